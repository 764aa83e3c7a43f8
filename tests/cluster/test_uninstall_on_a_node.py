"""`helm uninstall` on a real node: with a tier in use it waits, says for what, and takes nothing away; then it goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from controlplane import wait_until
from installed import Installed, Use

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def use(installed: Installed) -> Iterator[Use]:
    installed.settle()
    with installed.use() as use:
        use.declare()
        use.start()
        yield use


def test_uninstall_waits_for_a_tier_in_use_and_leaves_nothing_unerased(use: Use, installed: Installed) -> None:
    agent = installed.agent_pod() or {}
    refused = installed.helm("uninstall", "kvtier", "--timeout", "5m", check=False)
    assert refused.returncode != 0
    assert use.volume in refused.stdout + refused.stderr, refused.stdout + refused.stderr
    installed.wait_agent()
    assert (installed.agent_pod() or {})["metadata"]["uid"] == agent["metadata"]["uid"], "nothing was taken away"
    use.node.kubectl("-n", use.api.namespace, "delete", "pod", use.pod_name, "--wait=false")
    use.expect_erased("Exit", "Crash")
    installed.helm("uninstall", "kvtier", "--timeout", "5m")
    wait_until("the agent goes", lambda: installed.agent_pod() is None)  # by the garbage collector
