"""Recipes: strict, sparse, and every fault named with its place."""

from pathlib import Path

import pytest
from pydantic import PositiveFloat

from backends import AnyBackend, Local
from configs import RECIPES, Config, ConfigError, load
from flows.catalogue import FLOWS, Deployable
from flows.retrain import Retrain
from flows.sft_then_dpo import SFTThenDPO
from tests.small import given


class Inner(Config):
    rate: PositiveFloat = 1.0
    backend: AnyBackend = Local()


class Outer(Config):
    name: str
    inner: Inner = Inner()


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_values_come_from_yaml_then_overrides(tmp_path: Path) -> None:
    path = recipe(tmp_path, "name: a\ninner: {rate: 2}\n")
    assert load(Outer, path).inner.rate == 2
    assert load(Outer, path, ["inner.rate=3e-1", "name=b"]) == Outer(
        name="b", inner=Inner(rate=0.3)
    )


def test_switching_a_kind_is_one_override(tmp_path: Path) -> None:
    path = recipe(tmp_path, "name: a\ninner: {backend: {kind: deepspeed, zero_stage: 2}}\n")
    assert load(Outer, path, ["inner.backend.kind=fsdp"]).inner.backend.kind == "fsdp"
    kept = load(Outer, path, ["inner.backend.kind=deepspeed"]).inner.backend
    assert kept.model_dump()["zero_stage"] == 2


def test_a_kind_is_set_before_what_belongs_to_it(tmp_path: Path) -> None:
    path = recipe(tmp_path, "name: a\n")
    words = ["inner.backend.zero_stage=1", "inner.backend.kind=deepspeed"]
    assert load(Outer, path, words).inner.backend.model_dump()["zero_stage"] == 1


def test_a_fault_between_fields_is_told_in_a_short_line(tmp_path: Path) -> None:
    words = ["gate.metric=conversations/exact_match_change", "evaluate.config.generate_rows=0"]
    with pytest.raises(ConfigError) as caught:
        load(Retrain, RECIPES / "tiny.yaml", words)
    assert "recipe: gate.metric: " in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_home_that_only_a_shell_knows_is_refused(tmp_path: Path) -> None:
    for key in ("store", "runs"):
        with pytest.raises(ConfigError, match=rf"{key}: ~/mine: ~ is your home to a shell alone"):
            load(SFTThenDPO, RECIPES / "tiny.yaml", [f"{key}=~/mine"])


def test_an_anchor_is_a_copy(tmp_path: Path) -> None:
    class Two(Config):
        a: Inner
        b: Inner

    path = recipe(tmp_path, "a: &x {rate: 2}\nb: *x\n")
    assert load(Two, path, ["a.rate=3"]) == Two(a=Inner(rate=3), b=Inner(rate=2))


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("name: a\nx: 1\n", [], "x: unknown key"),
        ("name: a\ninner: {rat: 1}\n", [], "inner.rat: unknown key"),
        ("name: a\ninner: {rate: fast}\n", [], "inner.rate: "),
        ("name: a\ninner: {rate: -1}\n", [], "greater than 0 (got -1)"),
        ("inner: {rate: 1}\n", [], "name: missing"),
        ("name: a\ninner: {rate: yes}\n", [], "inner: "),
        ("name: a\ninner: {rate: .inf}\n", [], "inner.rate: "),
        ("name: a\n", ["inner={a"], "the value is not YAML"),
        ("name: a\n", ["name=set #2"], "quote the whole value"),
        ("name: a\ninner: {backend: {kind: fsdp, shardng: 1}}\n", [], "inner.backend.shardng: "),
        ("name: a\nname: b\n", [], "stands twice"),
        ("name: [a\n", [], "not YAML"),
        ("- a\n", [], "a recipe is a mapping"),
        ("name: a\n", ["inner.rate"], "dotted.key=value"),
        ("name: a\n", ["name.x=1"], "no keys under it"),
        ("name: a\nmany: [{x: 1}]\n", ["many.0.x=2"], "give the whole list, many=[...]"),
        (
            "name: a\n",
            ["inner.backend.kind=fspd"],
            "'inner.backend.kind=fspd': inner.backend.kind: ",
        ),
        ("name: a\n", ["inner.backend.zero_stage=2"], "inner.backend"),
        ("name: a\n", ["inner.rate=fast"], "'inner.rate=fast': inner.rate: "),
    ],
)
def test_faults_name_their_place(
    tmp_path: Path, text: str, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Outer, recipe(tmp_path, text), overrides)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value) or "backend" in expected


def test_a_missing_recipe_suggests_its_neighbours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*tiny\.yaml"):
        load(Outer, tmp_path / "tinny.yaml")


@pytest.mark.parametrize(
    ("flow", "path"),
    [(flow, path) for flow in FLOWS.values() for path in flow.recipes()],
    ids=lambda part: getattr(part, "stem", None) or part.name,
)
def test_every_recipe_loads(flow: Deployable, path: Path) -> None:
    load(flow.schema, path, given(path))


def test_every_field_says_what_it_is_for() -> None:
    """The Prefect form and ``--help`` show these texts."""
    schema = SFTThenDPO.model_json_schema()
    bare = [
        f"{name}.{field}"
        for name, model in schema["$defs"].items()
        for field, facts in model.get("properties", {}).items()
        if "description" not in facts and field != "kind" and "$ref" not in facts
    ]
    assert bare == []
