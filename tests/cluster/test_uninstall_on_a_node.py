"""`helm uninstall` on a real node: with a tier in use it waits, says for what, and takes nothing away; then it goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
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
    refused = installed.helm("uninstall", "kvtier", "--timeout", "2m", check=False)
    assert refused.returncode != 0
    assert use.volume in refused.stdout + refused.stderr, refused.stdout + refused.stderr
    assert installed.agent_is_ready(), "nothing was taken away"
    use.node.kubectl("-n", use.api.namespace, "delete", "pod", use.pod_name, "--wait=false")
    use.expect_erased("Exit", "Crash")
    installed.helm("uninstall", "kvtier", "--timeout", "2m")
    assert installed.agent_pod() is None
