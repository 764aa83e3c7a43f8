"""The controller's memory of the cluster: facts by key, and which tier each belongs to. A cache, and treated as one.

Events (`take`, `drop`) and full lists (`relist`) write it; both compare resource versions, so an old one never overwrites a new
one. Nothing is freed on its word: the last step of a deletion reads the API server itself (`reconciling`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvtier_operator.facts import AgentFacts, ErasureFacts, Key, NodeFacts, TierFacts, VolumeFacts
from kvtier_operator.path_claims import PathClaim, PathClaims, claim_of
from kvtier_operator.places import Surroundings

__all__ = ["Fact", "View"]

Fact = TierFacts | VolumeFacts | ErasureFacts | NodeFacts | AgentFacts
_Kind = type[Fact]
_KINDS: Final[tuple[_Kind, ...]] = (TierFacts, VolumeFacts, ErasureFacts, NodeFacts, AgentFacts)


class View:
    """`look_at_agents`: whether a node counts as heard only with a ready agent's pod on it."""

    def __init__(self, *, look_at_agents: bool) -> None:
        self._look_at_agents = look_at_agents
        self._facts: dict[_Kind, dict[Key, Fact]] = {kind: {} for kind in _KINDS}
        self._of_tier: dict[_Kind, dict[Key, dict[Key, Fact]]] = {VolumeFacts: {}, ErasureFacts: {}}
        self._on_node: dict[str, set[Key]] = {}
        self._agents_on: dict[str, dict[Key, AgentFacts]] = {}
        self._paths = PathClaims()
        self._touched: set[tuple[_Kind, Key]] | None = None

    def known(self, kind: _Kind, key: Key, uid: str, version: str) -> Fact | None:
        """The fact of this very object in this very version, so that it need not be made from the object again."""
        fact = self._facts[kind].get(key)
        if fact is None or not version or _text_version(fact) != version or _uid(fact) not in ("", uid):
            return None
        return fact

    def take(self, fact: Fact) -> set[Key]:
        """Remember it. Returns the tiers that it concerns; none if it was known, or is older than what is known."""
        kind, key = type(fact), key_of_fact(fact)
        if self._touched is not None:
            self._touched.add((kind, key))
        known = self._facts[kind].get(key)
        if known is not None and _version(fact) <= _version(known) and _uid(fact) == _uid(known):
            return set()
        self._facts[kind][key] = fact
        concerned = set()
        if isinstance(known, VolumeFacts | ErasureFacts):
            concerned |= self._unfile(known)
        if isinstance(fact, VolumeFacts | ErasureFacts):
            concerned |= self._file(fact)
        if isinstance(fact, TierFacts):
            concerned |= self._paths.put(fact.key, claim_of(fact))
        self._move_agent(known, fact)
        return concerned | self._tiers_of(fact, known)

    def drop(self, kind: _Kind, key: Key, version: int) -> set[Key]:
        """Forget what was deleted at `version`. Returns the tiers that it concerned."""
        if self._touched is not None:
            self._touched.add((kind, key))
        known = self._facts[kind].get(key)
        if known is None or _version(known) > version:
            return set()
        del self._facts[kind][key]
        if isinstance(known, VolumeFacts | ErasureFacts):
            return self._unfile(known)
        if isinstance(known, TierFacts):
            return self._paths.put(known.key, None) | {known.key}
        self._move_agent(known, None)
        return self._tiers_of(None, known)

    def begin_relist(self) -> None:
        self._touched = set()

    def relist(self, facts: Iterable[Fact]) -> tuple[set[Key], int]:
        """Make memory what a full list says, but for what events changed since `begin_relist`.

        Returns the tiers concerned and how many objects memory had otherwise.
        """
        touched = self._touched if self._touched is not None else set()
        self._touched = None
        concerned: set[Key] = set()
        differing = 0
        present: set[tuple[_Kind, Key]] = set()
        for fact in facts:
            mark = (type(fact), key_of_fact(fact))
            present.add(mark)
            if mark not in touched:
                changed = self.take(fact)
                differing += 1 if changed else 0
                concerned |= changed
        stays = present | touched
        for kind in _KINDS:
            for key in [key for key in self._facts[kind] if (kind, key) not in stays]:
                differing += 1
                concerned |= self.drop(kind, key, 2**63)
        return concerned, differing

    def _tiers_of(self, fact: Fact | None, known: Fact | None) -> set[Key]:
        either = fact if fact is not None else known
        if isinstance(either, TierFacts):
            return {either.key}
        if isinstance(fact, NodeFacts) and isinstance(known, NodeFacts) and _same_node(fact, known):
            return set()
        if isinstance(fact, AgentFacts) and isinstance(known, AgentFacts) and fact.ready == known.ready:
            return set()
        names = {
            node.name if isinstance(node, NodeFacts) else node.node_name
            for node in (fact, known)
            if isinstance(node, NodeFacts | AgentFacts)
        }
        return {tier for name in names for tier in self._tiers_on(name)}

    def _tiers_on(self, node_name: str) -> set[Key]:
        volumes = (self._facts[VolumeFacts].get(key) for key in self._on_node.get(node_name, ()))
        return {volume.tier for volume in volumes if isinstance(volume, VolumeFacts)}

    def _file(self, fact: VolumeFacts | ErasureFacts) -> set[Key]:
        self._of_tier[type(fact)].setdefault(fact.tier, {})[fact.key] = fact
        if isinstance(fact, VolumeFacts):
            self._on_node.setdefault(fact.node_name, set()).add(fact.key)
        return {fact.tier}

    def _unfile(self, fact: VolumeFacts | ErasureFacts) -> set[Key]:
        of_tier = self._of_tier[type(fact)]
        mates = of_tier.get(fact.tier, {})
        mates.pop(fact.key, None)
        if not mates:
            of_tier.pop(fact.tier, None)
        if isinstance(fact, VolumeFacts):
            on_node = self._on_node.get(fact.node_name, set())
            on_node.discard(fact.key)
            if not on_node:
                self._on_node.pop(fact.node_name, None)
        return {fact.tier}

    def _move_agent(self, known: Fact | None, fact: Fact | None) -> None:
        if isinstance(known, AgentFacts):
            mates = self._agents_on.get(known.node_name, {})
            mates.pop(known.key, None)
            if not mates:
                self._agents_on.pop(known.node_name, None)
        if isinstance(fact, AgentFacts):
            self._agents_on.setdefault(fact.node_name, {})[fact.key] = fact

    def tier(self, key: Key) -> TierFacts | None:
        found = self._facts[TierFacts].get(key)
        return found if isinstance(found, TierFacts) else None

    def path_taken_by(self, tier: Key) -> PathClaim | None:
        """The earlier tier that keeps this one's path from being used."""
        return self._paths.before(tier)

    def volumes(self, tier: Key) -> list[VolumeFacts]:
        return [it for it in self._of_tier[VolumeFacts].get(tier, {}).values() if isinstance(it, VolumeFacts)]

    def erasures(self, tier: Key) -> list[ErasureFacts]:
        return [it for it in self._of_tier[ErasureFacts].get(tier, {}).values() if isinstance(it, ErasureFacts)]

    def all_volumes(self) -> Iterable[VolumeFacts]:
        return (it for it in self._facts[VolumeFacts].values() if isinstance(it, VolumeFacts))

    def tier_keys(self) -> set[Key]:
        """Every tier there is, and every one that something belongs to."""
        return {*self._facts[TierFacts], *self._of_tier[VolumeFacts], *self._of_tier[ErasureFacts]}

    def tier_count(self) -> int:
        return len(self._facts[TierFacts])

    def surroundings(self, volumes: Iterable[VolumeFacts]) -> Surroundings:
        """The nodes of these volumes, and the agents on them."""
        names = {volume.node_name for volume in volumes}
        nodes = {name: node for name in names if isinstance(node := self._facts[NodeFacts].get(("", name)), NodeFacts)}
        if not self._look_at_agents:
            return Surroundings(nodes)
        agents = {
            name: any(agent.ready for agent in mates.values()) for name in names if (mates := self._agents_on.get(name))
        }
        return Surroundings(nodes, agents)


def key_of_fact(fact: Fact) -> Key:
    if isinstance(fact, NodeFacts):
        return "", fact.name
    return fact.key


def _version(fact: Fact) -> int:
    """Resource versions of one kind can be compared as numbers (KEP-5504; etcd's revision)."""
    text = _text_version(fact)
    return int(text) if text.isdecimal() else 0


def _text_version(fact: Fact) -> str:
    return (fact.meta.resource_version or "") if isinstance(fact, TierFacts) else fact.version


def _uid(fact: Fact) -> str:
    if isinstance(fact, TierFacts):
        return fact.meta.uid or ""
    return fact.uid if isinstance(fact, VolumeFacts | ErasureFacts) else ""


def _same_node(one: NodeFacts, other: NodeFacts) -> bool:
    """A kubelet updates its Node every few minutes; only what is looked at here counts."""
    return (one.ready, one.boot_id, one.system_uuid, one.created_at) == (
        other.ready,
        other.boot_id,
        other.system_uuid,
        other.created_at,
    )
