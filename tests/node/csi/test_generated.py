"""The stubs are what the definitions say, and the definitions what the specifications say where this driver meets them."""

from __future__ import annotations

from kvtier_node.csi import generate
from kvtier_node.csi.generated import csi_pb2 as pb
from kvtier_node.csi.generated import pluginregistration_pb2 as reg
from requirements import need_module


def test_generated_stubs_do_not_differ_from_their_definitions() -> None:
    need_module("grpc_tools")
    assert generate.main(["--check"]) == 0


def test_no_generated_file_is_missing_or_left_over() -> None:
    need_module("grpc_tools")
    wanted = generate.stubs()
    there = {path.name: path.read_bytes() for path in generate.GENERATED.iterdir() if path.is_file()}
    assert there == wanted
    assert set(wanted) >= {"csi_pb2.py", "csi_pb2.pyi", "csi_pb2_grpc.py", "pluginregistration_pb2_grpc.py"}


def test_messages_are_on_the_wire_what_kubelet_reads() -> None:
    """Field numbers of csi.proto v1.13.0 and of pluginregistration/v1, by their bytes."""
    assert pb.ProbeResponse(ready=pb.BoolValue(value=True)).SerializeToString() == b"\x0a\x02\x08\x01"
    request = pb.NodePublishVolumeRequest.FromString(
        b"\x0a\x01v" + b"\x22\x01t" + b"\x2a\x06\x12\x00\x1a\x02\x08\x01" + b"\x42\x06\x0a\x01k\x12\x01w"
    )
    assert (request.volume_id, request.target_path, dict(request.volume_context)) == ("v", "t", {"k": "w"})
    assert request.volume_capability.access_mode.mode == pb.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
    usage = pb.NodeGetVolumeStatsResponse(usage=[pb.VolumeUsage(available=1, total=2, used=3, unit=2)])
    assert usage.SerializeToString() == b"\x0a\x08\x08\x01\x10\x02\x18\x03\x20\x02"
    info = reg.PluginInfo(type="T", name="n", endpoint="e", supported_versions=["1"])
    assert info.SerializeToString() == b"\x0a\x01T\x12\x01n\x1a\x01e\x22\x011"
    assert reg.RegistrationStatus(plugin_registered=True, error="x").SerializeToString() == b"\x08\x01\x12\x01x"
    methods = pb.DESCRIPTOR.services_by_name["Node"].methods_by_name
    assert pb.DESCRIPTOR.package == "csi.v1"
    assert reg.DESCRIPTOR.services_by_name["Registration"].full_name == "pluginregistration.Registration"
    assert {"NodePublishVolume", "NodeUnpublishVolume", "NodeGetVolumeStats", "NodeGetInfo"} <= set(methods)
