"""The node agent as a CSI node service: pods get their volume from kubelet, and nothing is served before recovery.

`server.CsiService` is what the agent starts. The life of a volume is left to `provisioning`, `volume_watch` and `erasing`, the
API server to `cluster`.
"""
