"""Read YAML that nobody vouches for: plain data only, and bounded in size, depth, expansion and number of documents.

Anchors and aliases are allowed as far as they stay small. Refused: duplicate keys, merge keys, keys that are not text,
tags other than those of JSON, dates (they stay text), a stream that is not UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final, NoReturn, cast

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from kvtier_api.errors import InvalidResource

__all__ = ["MAX_DOCUMENTS", "MAX_SIZE_BYTES", "read_documents"]

MAX_SIZE_BYTES: Final = 1024 * 1024
MAX_DOCUMENTS: Final = 1000
MAX_DEPTH: Final = 40
MAX_NODES: Final = 50_000
MAX_NUMBER_LENGTH: Final = 64

_TAG: Final = "tag:yaml.org,2002:"


class _JsonLoader(yaml.SafeLoader):
    """Constructs what JSON knows and nothing else."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {}
    yaml_implicit_resolvers = {  # noqa: RUF012  (the name and type are PyYAML's)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TAG + "timestamp", _TAG + "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_plain(self, node: Node) -> int | float | bool:
        # A number of a megabyte would take minutes to convert.
        if not isinstance(node, ScalarNode) or len(node.value) > MAX_NUMBER_LENGTH:
            _refuse("a number that is too long, or no number", node.start_mark)
        try:
            if node.tag == _TAG + "bool":
                return bool(self.construct_yaml_bool(node))
            if node.tag == _TAG + "int":
                return int(self.construct_yaml_int(node))
            return float(self.construct_yaml_float(node))
        except (ValueError, LookupError) as error:
            # An explicit tag, such as `!!bool x`, on a text that is none.
            raise ConstructorError(
                None, None, f"no {node.tag.rpartition(':')[2]}", cast(Any, node.start_mark)
            ) from error

    def construct_object_without_duplicates(self, node: Node) -> dict[str, Any]:
        if not isinstance(node, MappingNode):
            _refuse("the tag !!map on what is no mapping", node.start_mark)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode) or key_node.tag != _TAG + "str":
                _refuse("a key that is not text", key_node.start_mark)
            key = key_node.value
            if key == "<<" and key_node.style is None:
                _refuse("a merge key '<<': write the fields out", key_node.start_mark)
            if key in found:
                _refuse(f"the key {key[:60]!r} twice", key_node.start_mark)
            found[key] = self.construct_object(value_node, deep=True)
        return found

    def construct_array(self, node: Node) -> list[Any]:
        if not isinstance(node, SequenceNode):
            _refuse("the tag !!seq on what is no list", node.start_mark)
        return [self.construct_object(child, deep=True) for child in node.value]

    def refuse(self, node: Node) -> None:
        _refuse(f"the tag {node.tag[:60]!r}", node.start_mark)


def _register() -> None:
    for tag, constructor in (
        ("null", yaml.SafeLoader.construct_yaml_null),
        ("bool", _JsonLoader.construct_plain),
        ("str", yaml.SafeLoader.construct_yaml_str),
        ("int", _JsonLoader.construct_plain),
        ("float", _JsonLoader.construct_plain),
        ("map", _JsonLoader.construct_object_without_duplicates),
        ("seq", _JsonLoader.construct_array),
    ):
        _JsonLoader.add_constructor(_TAG + tag, constructor)
    _JsonLoader.add_constructor(None, _JsonLoader.refuse)


_register()


def read_documents(text: str, source: str) -> Iterator[tuple[int, Any]]:
    """(number from 1, plain data) of each document that is not empty. `source` names the text in errors.

    Raises InvalidResource that names the source, the document and the line.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SIZE_BYTES:
        raise InvalidResource(f"more than {MAX_SIZE_BYTES} bytes", obj=source, remedy="split the file")
    number = 0
    try:
        loader = _JsonLoader(text)
        _check_depth(text)
        while loader.check_node():
            number += 1
            if number > MAX_DOCUMENTS:
                raise InvalidResource(f"more than {MAX_DOCUMENTS} documents", obj=source, remedy="split the file")
            node: Node = loader.get_node()  # type: ignore[assignment]  # check_node() said that there is one
            _expanded(node, {}, set())
            data = loader.construct_document(node)
            if data is not None:
                yield number, data
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise InvalidResource(
            f"not acceptable YAML: {error.problem}",
            obj=f"{source}: document {max(number, 1)}{line}",
            remedy="correct it",
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidResource(
            f"not acceptable YAML: {str(error).splitlines()[0][:200]}",
            obj=f"{source}: document {max(number, 1)}",
            remedy="correct it",
        ) from error


def _check_depth(text: str) -> None:
    """Before anything is composed, because composing recurses."""
    depth = 0
    nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        nodes += isinstance(event, yaml.NodeEvent)
        if depth > MAX_DEPTH:
            _refuse(f"more than {MAX_DEPTH} levels", event.start_mark)
        if nodes > MAX_NODES:
            _refuse(f"more than {MAX_NODES} values", event.start_mark)


def _refuse(what: str, mark: Any) -> NoReturn:
    raise ConstructorError(None, None, what, mark)


def _expanded(node: Node, known: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """Values and levels after each alias is written out; aliases are shared nodes, so counting costs no memory."""
    if isinstance(node, ScalarNode):
        return 1, 0
    if id(node) in known:
        return known[id(node)]
    if id(node) in above:
        _refuse("an alias of what contains it", node.start_mark)
    above.add(id(node))
    children = node.value if isinstance(node, SequenceNode) else [part for pair in node.value for part in pair]
    sizes = [_expanded(child, known, above) for child in children]
    above.discard(id(node))
    values = 1 + sum(size for size, _ in sizes)
    levels = 1 + max((level for _, level in sizes), default=0)
    if values > MAX_NODES:
        _refuse(f"aliases that expand to more than {MAX_NODES} values", node.start_mark)
    if levels > MAX_DEPTH:
        _refuse(f"aliases that expand to more than {MAX_DEPTH} levels", node.start_mark)
    known[id(node)] = values, levels
    return known[id(node)]
