"""Pods as consumers: who they are, where kubelet wants their volume, and how their use of it is ended.

Needs neither gRPC nor the API server: `recovery` and `guarding` use it on every host.
"""
