"""The main job through its command line: real ranks, a real store, wrong input, kill -9."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.catalogue import FLOWS
from stages import STAGES, manifest, resume
from stages.fetch import Fetch
from tests.small import ENV, ROOT, python

MODULE = "flows.sft_then_dpo"
# The tiny recipe, with less of everything.
SHORT = [
    "conversations.config.source.rows=450",
    "preferences.config.source.rows=150",
    "sft.config.max_steps=12",
    "dpo.config.max_steps=4",
    "sft.save_every=4",
    "evaluate.config.generate_rows=8",
]


def flow(store: Path, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    places = [f"store={store}", f"runs={store}-runs"]
    return python("-m", MODULE, "tiny", "--engine", "inline", *SHORT, *places, *words, cwd=cwd)


def plan(store: Path, *words: str) -> dict[str, str]:
    """What the plan says of each stage: label to verb."""
    done = flow(store, "--plan", *words)
    assert done.returncode == 0, done.stderr
    heads = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    return dict(line.split(": ", 1) for line in heads)


def outputs(store: Path, stage: str) -> list[Path]:
    return sorted(path.parent for path in (store / stage).glob(f"*/{manifest.NAME}"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the short recipe has run to its end."""
    store = tmp_path_factory.mktemp("finished") / "store"
    done = flow(store)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (store.parent / "stdout.txt").write_text(done.stdout)
    return store


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The finished store, to damage at will."""
    return Path(shutil.copytree(finished, tmp_path / "store", symlinks=True))


def test_a_run_ends_with_scores_and_a_report(finished: Path) -> None:
    text = (finished.parent / "stdout.txt").read_text()
    assert "sft: step " in text and "tokens/s" in text
    for word in ("base", "sft", "dpo", "exact match"):
        assert word in text.lower().rpartition("evaluate dpo: ran")[2]
    report = Path(text.rpartition("report: ")[2].split("  (")[0])
    assert report.exists() and "## " in report.read_text()
    images = [line for line in report.read_text().splitlines() if line.startswith("![")]
    assert images
    for line in images:
        assert (report.parent / line.rpartition("(")[2].rstrip(")")).stat().st_size > 0


def test_the_run_folder_shows_what_was_resolved(finished: Path) -> None:
    folder = Path(f"{finished}-runs") / "tiny"
    run = json.loads((folder / "run.json").read_text())
    assert run["config"]["sft"]["config"]["max_steps"] == 12
    labels = {step["label"] for step in run["steps"]}
    assert {"fetch model", "sft", "convert sft", "dpo", "evaluate dpo"} <= labels
    assert (folder / "sft").resolve() == outputs(finished, "sft")[0].resolve()


def test_training_was_really_sharded_and_the_manifest_says_so(finished: Path) -> None:
    for stage, wrapper in (("sft", "fsdp"), ("dpo", "deepspeed")):
        done = manifest.read(outputs(finished, stage)[0])
        assert done
        ranks = done.provenance["ranks"]
        assert [rank["wrapper"] for rank in ranks] == [wrapper, wrapper]
        assert done.provenance["accumulation_steps"] >= 1


def test_a_second_run_does_nothing_and_takes_seconds(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    started = time.monotonic()
    done = flow(finished)
    seconds = time.monotonic() - started
    assert done.returncode == 0 and "ran in" not in done.stdout
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()} == before
    assert seconds < 20


def test_only_what_a_change_reaches_runs_again(finished: Path, tmp_path: Path) -> None:
    assert set(plan(finished).values()) == {"reuse"}
    beta = plan(finished, "dpo.config.beta=0.2")
    assert {label for label, verb in beta.items() if verb == "run"} == {
        "dpo",
        "convert dpo",
        "evaluate dpo",
    }
    for kind in ("ddp", "deepspeed"):
        assert set(plan(finished, f"sft.backend.kind={kind}").values()) == {"reuse"}
    ranks = plan(finished, "sft.backend.kind=local", "sft.resources.ranks_per_node=1")
    assert set(ranks.values()) == {"reuse"}
    assert set(plan(finished, "trackers=[wandb]").values()) == {"reuse"}


def test_one_changed_row_runs_everything_after_it(finished: Path, tmp_path: Path) -> None:
    rows = next((outputs(finished, "fetch")[0].parent).glob("*/data/conversations.jsonl"))
    mine = tmp_path / "mine.jsonl"
    mine.write_text(rows.read_text())
    source = "conversations.config.source"
    words = [f"{source}.kind=local_data", f"{source}.path={mine}"]
    short = [word for word in SHORT if not word.startswith("conversations")]
    places = [f"store={finished}", f"runs={finished}-runs", "--engine", "inline", "--plan"]

    def places_of(words: list[str]) -> dict[str, str]:
        done = python("-m", MODULE, "tiny", *short, *words, *places)
        assert done.returncode == 0, done.stderr
        heads, found = "", {}
        for line in done.stdout.splitlines():
            if not line.startswith(" "):
                heads = line.split(":")[0]
            elif line.startswith("  output:"):
                found[heads] = line.split()[-1]
        return found

    before = places_of(words)
    lines = mine.read_text().splitlines(keepends=True)
    mine.write_text(
        "".join([lines[0].replace("user", "user", 1).replace("}", " }", 1), *lines[1:]])
    )
    after = places_of(words)
    same = {label for label in before if before[label] == after[label]}
    assert same == {"fetch model", "fetch preferences"}


def start(store: Path, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", MODULE, "tiny", "--engine", "inline", *SHORT]
    argv += [f"store={store}", f"runs={store}-runs", *words]
    return subprocess.Popen(argv, env=os.environ | ENV, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def ranks_of(store: Path) -> list[str]:
    """Processes whose command line names the store."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(store) in command and "Z" not in (entry / "stat").read_text().rpartition(")")[2][:3]:
            found.append(command)
    return found


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_kill_9_then_the_same_command_gives_the_same_weights(finished: Path, copied: Path) -> None:
    """SFT under FSDP2 over two ranks goes on from its newest complete checkpoint, bit for bit."""
    sft = outputs(copied, "sft")[0]
    for stage in ("sft", "dpo"):
        shutil.rmtree(copied / stage)
    running = start(copied)
    wait_for(lambda: resume.newest(sft) is not None, 120)
    running.send_signal(signal.SIGKILL)
    running.wait()
    wait_for(lambda: not ranks_of(copied), 20)
    assert not (sft / manifest.NAME).exists()
    assert plan(copied)["sft"].startswith("resume from step ")
    again = flow(copied)
    assert again.returncode == 0, again.stderr
    assert "sft: resumed in" in again.stdout
    undisturbed = outputs(finished, "sft")[0] / "model" / "model.safetensors"
    assert (sft / "model" / "model.safetensors").read_bytes() == undisturbed.read_bytes()
    steps = [json.loads(row)["step"] for row in (sft / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 13))


def test_two_runs_at_once_do_the_work_once(copied: Path) -> None:
    shutil.rmtree(copied / "evaluate")
    first, second = start(copied), start(copied, "name=other")
    texts = [run.communicate(timeout=240)[0] for run in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    for label in ("evaluate base", "evaluate sft", "evaluate dpo"):
        assert sum(text.count(f"{label}: ran in") for text in texts) == 1
    assert any("another run is making this; waiting" in text for text in texts)


def test_a_run_of_the_same_name_waits_and_a_plan_does_not(finished: Path) -> None:
    with (Path(f"{finished}-runs") / ".tiny.lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = start(finished)
        assert waiting.stdout
        said = [waiting.stdout.readline() for _ in range(2)]
        assert said[1].endswith("  another run named tiny is at work; waiting for it to end\n")
        assert set(plan(finished).values()) == {"reuse"}
        assert waiting.poll() is None
    rest, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and "evaluate dpo: reused" in rest


def test_ctrl_c_ends_every_process(copied: Path) -> None:
    shutil.rmtree(copied / "dpo")
    running = start(copied)
    wait_for(lambda: any("torch.distributed.run" in line for line in ranks_of(copied)), 60)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=30) == 130
    assert not ranks_of(copied)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sft.config.learning_rat=1"], "sft.config.learning_rat: unknown key"),
        (["sft.backend.zero_stage=2"], "sft.backend.zero_stage: unknown key"),
        (["sft.config.epochs=many"], "sft.config.epochs: "),
        (["sft.config.global_batch_size=33"], "does not divide over 2 ranks"),
        (["sft.resources.ranks_per_node=64", "sft.config.global_batch_size=1024"], "CPU core"),
        (["sft.resources.device=cuda", "sft.resources.ranks_per_node=64",
          "sft.config.global_batch_size=1024"], "GPU"),
        (["model.config.source.kind=local_model", "model.config.source.path=/no/such"],
         "/no/such: no such file or directory"),
        (["dpo.config.attention=flash_attention_2"],
         "dpo: attention: flash_attention_2 needs a GPU"),
        (["trackers=[wandb]"],
         "sft, dpo: trackers: wandb not installed; type: pip install wandb, or leave out what"),
        (["trackers=[comet]"], "trackers.0: Input should be 'wandb', 'mlflow' or 'trackio'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(tmp_path: Path, words: list[str], says: str) -> None:
    store = tmp_path / "store"
    done = flow(store, *words)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not store.exists()


def test_an_empty_word_in_place_of_a_recipe_is_one_line() -> None:
    done = python("-m", MODULE, "", "--plan")
    assert done.returncode == 2 and "cannot be read as a recipe" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_recipe_that_is_not_there_is_not_replaced_by_ours_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()  # nor is ours hidden by what happens to be called so
    for word, code in (("mine/tiny.yaml", 2), ("tiny", 0)):
        done = python("-m", MODULE, word, "--plan", cwd=tmp_path)
        assert done.returncode == code, done.stderr
        if code:
            assert "mine/tiny.yaml: no such recipe; did you mean " in done.stderr


def test_a_reader_who_has_seen_enough_is_no_fault() -> None:
    argv = [sys.executable, "-m", MODULE, "tiny", "--plan"]
    with subprocess.Popen(
        argv, env=os.environ | ENV, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_ctrl_c_while_a_command_is_loaded_shows_no_traceback() -> None:
    done = python("-c", "import flows; raise KeyboardInterrupt")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "stopped\n")


def test_a_damaged_output_is_not_reused(copied: Path) -> None:
    weights = next(copied.glob("convert/*/model/model.safetensors"))
    with weights.open("r+b") as file:
        file.truncate(1000)
    done = flow(copied)
    assert done.returncode == 2
    assert "is damaged: model/model.safetensors is 1000 and was" in done.stderr
    assert "remove it to make it again" in done.stderr and "Traceback" not in done.stderr
    (weights.parents[1] / manifest.NAME).write_text("")
    done = flow(copied, "--plan")
    assert done.returncode == 1 and "not a manifest; remove" in done.stderr


def test_a_renamed_file_is_another_file_and_a_moved_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for place in ("rows.txt", "rows.jsonl", "a/rows.jsonl"):
        (tmp_path / place).write_text("{}")

    def identity(place: str) -> str:
        source = {"kind": "local_data", "path": tmp_path / place}
        config = Fetch.model_validate({"source": source})
        return manifest.identify(STAGES["fetch"], config, {}).fingerprint

    assert identity("rows.jsonl") == identity("a/rows.jsonl") != identity("rows.txt")


def test_empty_data_is_refused_by_the_data_stage(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    source = "conversations.config.source"
    words = [word for word in SHORT if not word.startswith("conversations")]
    words += [f"{source}.kind=local_data", f"{source}.path={tmp_path / 'empty.jsonl'}"]
    words += [f"store={copied}", f"runs={copied}-runs", "--engine", "inline"]
    done = python("-m", MODULE, "tiny", *words)
    assert done.returncode == 1
    assert "prepare data failed" in done.stderr and "empty.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unwritable_store_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = flow(tmp_path / "file" / "store")
    assert done.returncode == 1
    assert str(tmp_path / "file") in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with 3 MB on it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_named_and_nothing_counts_as_done(small_disk: Path, finished: Path) -> None:
    store = small_disk / "store"
    (store / "fetch").mkdir(parents=True)
    (small_disk / "filler").write_bytes(b"x" * 2_800_000)
    done = flow(store)
    assert done.returncode == 1
    assert "No space left" in done.stderr and "Traceback" not in done.stderr
    (small_disk / "filler").unlink()
    assert not any(path.name == manifest.NAME for path in store.rglob("*"))


def test_help_answers_at_once_and_lists_the_recipes() -> None:
    started = time.monotonic()
    done = python("-m", MODULE, "--help")
    assert done.returncode == 0 and "tiny" in done.stdout and "--plan" in done.stdout
    assert time.monotonic() - started < 4  # a bar of 2 s on an idle machine


def test_importing_a_flow_loads_neither_torch_nor_transformers_nor_prefect() -> None:
    code = (
        "import sys, flows.sft_then_dpo, flows.command, stages;"
        "print([m for m in ('torch', 'transformers', 'prefect', 'datasets') if m in sys.modules])"
    )
    assert python("-c", code).stdout.strip() == "[]"


def test_the_four_packages_resolve_inside_this_project() -> None:
    code = "import flows, stages, backends, configs as c; print(*map(lambda m: m.__file__, "
    code += "(flows, stages, backends, c)))"
    for path in python("-c", code, cwd=ROOT).stdout.split():
        assert Path(path).is_relative_to(ROOT)


@pytest.mark.parametrize(
    "recipe",
    [p.stem for p in FLOWS["sft-then-dpo"].recipes() if p.stem not in ("tiny", "smollm2")],
)
def test_recipes_for_real_hardware_plan_without_a_gpu(tmp_path: Path, recipe: str) -> None:
    done = python("-m", MODULE, recipe, "--plan", f"store={tmp_path}/s", f"runs={tmp_path}/r")
    assert done.returncode == 0, done.stderr
    assert "cannot run here" in done.stdout and "-m stages " in done.stdout
    assert not (tmp_path / "s").exists()
