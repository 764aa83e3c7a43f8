{{- define "kvtier.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of every object. Call with (dict "root" $ "component" "controller"). */}}
{{- define "kvtier.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvtier
{{ include "kvtier.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What selects pods. The name is kvtier whatever the release is called: the controller looks for agents by it. */}}
{{- define "kvtier.selector" -}}
app.kubernetes.io/name: kvtier
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Call with (dict "root" $ "image" .Values.node.image). */}}
{{- define "kvtier.repository" -}}
{{- with .root.Values.image.registry -}}{{- trimSuffix "/" . -}}/{{- end -}}{{- .image.repository -}}
{{- end -}}

{{- define "kvtier.image" -}}
{{- $repository := include "kvtier.repository" . -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.controllerAccount" -}}{{ include "kvtier.fullname" . }}-controller{{- end -}}
{{- define "kvtier.nodeAccount" -}}{{ include "kvtier.fullname" . }}-node{{- end -}}
{{- define "kvtier.drainAccount" -}}{{ include "kvtier.fullname" . }}-drain{{- end -}}
{{- define "kvtier.releaseAccount" -}}{{ include "kvtier.fullname" . }}-release{{- end -}}
{{- define "kvtier.lease" -}}{{ include "kvtier.fullname" . }}-controller{{- end -}}

{{/* The user of a service account, as a CEL string. Call with (dict "root" $ "account" NAME). */}}
{{- define "kvtier.user" -}}'system:serviceaccount:{{ .root.Release.Namespace }}:{{ .account }}'{{- end -}}

{{- define "kvtier.injects" -}}
{{- if and .Values.injection.enabled (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy") -}}true{{- end -}}
{{- end -}}

{{/* A container of the restricted profile. */}}
{{- define "kvtier.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kvtier.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvtier.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kvtier.refuse" -}}
{{- $typed := "leave unerased places" -}}
{{- if and .Values.drain.force (ne .Values.drain.force $typed) -}}
{{- fail (printf "drain.force: %q is not the confirmation: write exactly %q, or leave it empty" .Values.drain.force $typed) -}}
{{- end -}}
{{- range $image := list .Values.controller.image .Values.node.image -}}
{{- $repository := include "kvtier.repository" (dict "root" $ "image" $image) -}}
{{- if not (regexMatch "^(localhost|[^/]*[.:][^/]*)/" $repository) -}}
{{- fail (printf "image.registry: %q names no registry, so it would come from Docker Hub, where kvtier has no images: set image.registry to where you pushed yours (docs/install.md)" $repository) -}}
{{- end -}}
{{- end -}}
{{- range .Values.controller.watchNamespaces -}}
{{- if eq . $.Release.Namespace -}}{{- fail (printf "controller.watchNamespaces: %q is kvtier's own namespace: keep tiers out of it" .) -}}{{- end -}}
{{- end -}}
{{- $kubelet := .Values.node.kubeletDir -}}
{{- range $path := concat .Values.node.tierRoots (list .Values.node.stateDir) -}}
{{- if or (eq $path $kubelet) (hasPrefix (printf "%s/" $kubelet) $path) -}}
{{- fail (printf "node: %q is kubelet's: choose a directory outside node.kubeletDir %q" $path $kubelet) -}}
{{- end -}}
{{- end -}}
{{- range $root := .Values.node.tierRoots -}}
{{- if regexMatch "^/(bin|boot|dev|etc|lib|lib64|proc|root|run|sbin|sys|usr)(/|$)" $root -}}
{{- fail (printf "node.tierRoots: %q is the system's: choose a directory of its own, such as /var/lib/kvtier/tiers or the mount point of a disk" $root) -}}
{{- end -}}
{{- if or (eq $root $.Values.node.stateDir) (hasPrefix (printf "%s/" $root) $.Values.node.stateDir) (hasPrefix (printf "%s/" $.Values.node.stateDir) $root) -}}
{{- fail (printf "node.tierRoots: %q and node.stateDir %q lie in each other: the ledger must be outside of what tiers may use" $root $.Values.node.stateDir) -}}
{{- end -}}
{{- end -}}
{{- end -}}
