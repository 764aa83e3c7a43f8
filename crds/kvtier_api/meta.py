"""What every kind shares: strict models, object metadata, conditions, label selectors, times.

Field names are snake_case in Python and camelCase in documents (`by_name=False` at parsing keeps snake_case out of
manifests). Models are frozen; a changed copy is made with `model_copy(update=...)`. A `spec` refuses unknown fields.
A `status` ignores them, because it may have been written by a newer controller or agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import core_schema

from kvtier_api.quantity import invalid
from kvtier_api.reasons import Reason
from kvtier_api.rules import Rule, TransitionRule

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "Count",
    "LabelRequirement",
    "LabelSelector",
    "MicroTime",
    "ObjectMeta",
    "OwnerReference",
    "Resource",
    "SpecModel",
    "StatusModel",
    "Time",
    "find_condition",
    "set_condition",
    "unknown_conditions",
]

GROUP: Final = "kvtier.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "kvtier.dev/v1alpha1"

DNS_LABEL_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


def _utc(value: datetime) -> datetime:
    return value.astimezone(UTC)


def _utc_seconds(value: datetime) -> datetime:
    return value.astimezone(UTC).replace(microsecond=0)


def _rfc3339(value: datetime) -> str:
    precision = "microseconds" if value.microsecond else "seconds"
    return value.isoformat(timespec=precision).replace("+00:00", "Z")


Time = Annotated[AwareDatetime, AfterValidator(_utc_seconds), PlainSerializer(_rfc3339, when_used="json")]
"""An instant in whole seconds of UTC, as metav1.Time."""
MicroTime = Annotated[AwareDatetime, AfterValidator(_utc), PlainSerializer(_rfc3339, when_used="json")]
"""An instant in microseconds of UTC, as metav1.MicroTime."""
Count = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]
DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL_PATTERN)]
DnsSubdomain = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN_PATTERN)]
LabelMap = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)]


class _Model(BaseModel):
    """camelCase aliases, frozen, descriptions from the docstrings of attributes, and the rules of `rules`."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        # A traceback must not show what was written where a reference to a secret belongs.
        hide_input_in_errors=True,
    )
    rules: ClassVar[tuple[Rule | TransitionRule, ...]] = ()

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        for rule in self.rules:
            if isinstance(rule, Rule) and not rule.holds(self):
                raise invalid(rule.message, rule.remedy, field=rule.field)
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        if cls.rules:
            found["x-kubernetes-validations"] = [rule.to_crd() for rule in cls.rules]
        return found


class SpecModel(_Model):
    """A part of a spec: unknown fields are errors."""


class StatusModel(_Model):
    """A part of a status: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class OwnerReference(SpecModel):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: Flag | None = None
    block_owner_deletion: Flag | None = None


class ObjectMeta(SpecModel):
    """metav1.ObjectMeta: every field that an API server may return, so that any other one is a mistake."""

    name: DnsSubdomain
    namespace: DnsLabel = "default"
    uid: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    generation: Count | None = None
    resource_version: str | None = None
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    deletion_grace_period_seconds: Count | None = None
    finalizers: list[str] = Field(default_factory=list)
    owner_references: list[OwnerReference] = Field(default_factory=list)
    generate_name: str | None = None
    self_link: str | None = None
    managed_fields: list[dict[str, Any]] | None = None


class LabelOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class LabelRequirement(SpecModel):
    """One requirement of a metav1.LabelSelector."""

    rules = (
        Rule(
            "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 : "
            "!has(self.values) || size(self.values) == 0",
            lambda it: (it.operator in (LabelOperator.IN, LabelOperator.NOT_IN)) == bool(it.values),
            "In and NotIn need values, Exists and DoesNotExist have none",
            "add values or change the operator",
            "values",
        ),
    )

    key: Annotated[str, Field(min_length=1, max_length=317)]
    operator: LabelOperator
    values: list[Annotated[str, Field(max_length=63)]] | None = Field(default=None, max_length=64)

    def holds(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case LabelOperator.IN:
                return self.key in labels and labels[self.key] in (self.values or ())
            case LabelOperator.NOT_IN:
                return labels.get(self.key) not in (self.values or ())
            case LabelOperator.EXISTS:
                return self.key in labels
            case LabelOperator.DOES_NOT_EXIST:
                return self.key not in labels


class LabelSelector(SpecModel):
    """metav1.LabelSelector. An empty one selects everything."""

    match_labels: LabelMap | None = None
    match_expressions: list[LabelRequirement] | None = Field(default=None, max_length=16)

    def selects(self, labels: Mapping[str, str]) -> bool:
        wanted = (self.match_labels or {}).items()
        return all(labels.get(key) == value for key, value in wanted) and all(
            requirement.holds(labels) for requirement in self.match_expressions or ()
        )


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
    """Conditions of a tier. Observations, not states: True only when it was measured."""

    READY = "Ready"
    PROVISIONED = "Provisioned"
    ENCRYPTED = "Encrypted"
    SALT_ENFORCED = "SaltEnforced"
    RETENTION_ENFORCED = "RetentionEnforced"
    SCRUBBED = "Scrubbed"
    HOST_HARDENED = "HostHardened"
    MAPPED = "Mapped"
    COMPLETE = "Complete"
    """Of an erasure only."""


class Condition(StatusModel):
    """metav1.Condition. `reason` is any CamelCase word: an older reader must not fail on a newer writer's."""

    type: Annotated[str, Field(max_length=316, pattern=r"^[A-Z][A-Za-z0-9]*$")]
    status: ConditionStatus
    observed_generation: Count | None = None
    last_transition_time: Time
    """When the status changed last."""
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Z][A-Za-z0-9]*$")]
    message: Annotated[str, Field(max_length=32768)] = ""


Conditions = Annotated[list[Condition], Field(max_length=16)]


def find_condition(conditions: Iterable[Condition], type: str) -> Condition | None:  # noqa: A002
    return next((condition for condition in conditions if condition.type == type), None)


def set_condition(
    conditions: Sequence[Condition],
    type: ConditionType,  # noqa: A002
    status: ConditionStatus | bool | None,
    reason: Reason,
    message: str = "",
    *,
    generation: int | None = None,
    now: datetime,
) -> list[Condition]:
    """A new list with one condition set; `lastTransitionTime` changes only when the status does, and never goes back.

    `status` may be True, False or None (Unknown). `generation` is the object's that was observed.
    """
    if not isinstance(status, ConditionStatus):
        status = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}[status]
    old = find_condition(conditions, type)
    if old is not None:
        # The clock that wrote the old one may have been ahead, and this one set back since.
        now = old.last_transition_time if old.status == status else max(now, old.last_transition_time)
    new = Condition(
        type=type.value,
        status=status,
        observed_generation=generation,
        last_transition_time=now,
        reason=reason.value,
        message=message,
    )
    if old is None:
        return [*conditions, new]
    return [new if condition is old else condition for condition in conditions]


def unknown_conditions(types: Iterable[ConditionType], *, generation: int | None, now: datetime) -> list[Condition]:
    """The first visit's list: each type is there, and says Unknown until something was measured."""
    found: list[Condition] = []
    for type_ in types:
        found = set_condition(found, type_, None, Reason.NOT_YET_MEASURED, generation=generation, now=now)
    return found


class Resource(_Model):
    """The base of the four kinds: `metadata`, `spec`, `status`."""

    plural: ClassVar[str]
    short_name: ClassVar[str]
    printer_columns: ClassVar[tuple[tuple[str, str, str], ...]]
    """(name, type, JSONPath) as kubectl shows them."""
    selectable_fields: ClassVar[tuple[str, ...]] = ()

    metadata: ObjectMeta

    @property
    def key(self) -> str:
        """ "namespace/name"."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    def to_manifest(self) -> dict[str, Any]:
        """Plain data for YAML, JSON or the API: camelCase, without what is not set, quantities as written."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
