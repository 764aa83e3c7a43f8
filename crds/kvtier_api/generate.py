"""Write crds/manifests/*.yaml from the models: `python -m kvtier_api.generate [--check] [--output DIRECTORY]`.

The models are the source. `--check` writes nothing and fails when a file differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from kvtier_api.documents import KINDS
from kvtier_api.meta import GROUP, VERSION, Resource
from kvtier_api.structural import structural_schema

__all__ = ["crd", "main", "manifests"]

MANIFESTS: Final = Path(__file__).resolve().parent.parent / "manifests"


class _PlainDumper(yaml.SafeDumper):
    """Writes values out in full: a reader of a CRD expects no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  (PyYAML's signature)
        return True


_HEADER: Final = "# Generated from crds/kvtier_api by `python -m kvtier_api.generate`. Do not edit.\n"


def crd(model: type[Resource]) -> dict[str, Any]:
    """The CustomResourceDefinition of one kind."""
    kind = model.__name__
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{model.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": model.plural,
                "singular": kind.lower(),
                "shortNames": [model.short_name],
                "categories": ["kvtier"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": structural_schema(model)},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": type_, "jsonPath": path} for name, type_, path in model.printer_columns
                    ],
                    "selectableFields": [{"jsonPath": path} for path in model.selectable_fields],
                }
            ],
        },
    }


def manifests() -> dict[str, str]:
    """File name → YAML text of every kind."""
    return {
        f"{GROUP}_{model.plural}.yaml": _HEADER + yaml.dump(crd(model), Dumper=_PlainDumper, sort_keys=False, width=120)
        for model in KINDS.values()
    }


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_api.generate", description="write the CRDs from the models")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs")
    parser.add_argument("--output", type=Path, default=MANIFESTS, metavar="DIRECTORY")
    options = parser.parse_args(arguments)
    wanted = manifests()
    differing = [
        name
        for name, text in wanted.items()
        if not (options.output / name).is_file() or (options.output / name).read_text(encoding="utf-8") != text
    ]
    stale = sorted(path.name for path in options.output.glob("*.yaml") if path.name not in wanted)
    if options.check:
        for name in [*differing, *stale]:
            print(
                f"{options.output / name}: differs from the models (run `python -m kvtier_api.generate`)",
                file=sys.stderr,
            )
        return 1 if differing or stale else 0
    options.output.mkdir(parents=True, exist_ok=True)
    for name in differing:
        (options.output / name).write_text(wanted[name], encoding="utf-8")
    for name in stale:
        (options.output / name).unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
