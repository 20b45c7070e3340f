"""Finished runs as lines of a CSV file: written as they end, not run again, gathered from anywhere."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gar.cli.app import run as gar_command
from gar.config import MixtureConfig
from gar.data import export, identity, load, load_mixture
from gar.errors import UserError
from gar.runs import State, state_of
from gar.runs.names import RESULT
from gar.sweeps.executors import Event, Job
from gar.sweeps.local import LocalExecutor
from gar.sweeps.stored import KEY, Store, collect, follows, read_lines
from gar.sweeps.suite import Suite
from gar.sweeps.sweep import make_plan, run_sweep
from support.sweeps import StandIn, fail, finish, quiet, tiny_base, tiny_suite

ROOT = Path(__file__).parent.parent


def rows(path: Path) -> list[dict[str, str]]:
    """Of a file as it is, or gzipped."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def small(**tree: Any) -> Suite:
    return tiny_suite(methods=["baseline", "gar"], seeds=2, order="seed", **tree)


def sweep(
    suite: Suite, out: Path, store: Path, does: Callable[[Job], Event] = finish, **options: Any
) -> StandIn:
    executor = StandIn(does)
    run_sweep(make_plan(suite, out, keep=Store(store)), executor, view=quiet(), **options)
    return executor


def test_runs_are_stored_as_they_end_and_not_run_again_elsewhere(tmp_path: Path) -> None:
    store = tmp_path / "kept" / "runs.csv"
    first = sweep(small(), tmp_path / "here", store)
    assert len(first.seen) == 4
    kept = rows(store)
    assert [row["id"] for row in kept] == [run.id for run in small().runs()]
    assert {row["name"] for row in kept} == {"baseline", "gar"}
    assert {row["seconds"] for row in kept} == {"2"}
    assert {row["accuracy"] for row in kept} == {"0.5"}
    assert {row["accuracy.mood"] for row in kept} == {"0.5"}
    plan = make_plan(small(), tmp_path / "elsewhere", keep=Store(store))
    assert plan.states == {State.FINISHED: 4}
    assert plan.estimate(1) == (0, 0)
    assert sweep(small(), tmp_path / "elsewhere", store).seen == []
    more = tiny_suite(methods=["baseline", "gar"], seeds=3, order="seed")
    again = sweep(more, tmp_path / "elsewhere", store)
    assert again.seen == ["tiny/mood+nli/baseline/seed-2", "tiny/mood+nli/gar/seed-2"]
    assert len(rows(store)) == 6


def test_another_configuration_or_other_data_are_other_runs(tmp_path: Path) -> None:
    store = tmp_path / "runs.csv"
    sweep(small(), tmp_path / "a", store)
    assert len(sweep(small(set={"optimizer.clip": 0.5}), tmp_path / "b", store).seen) == 4
    assert len(sweep(small(set={"threads": 1}), tmp_path / "c", store).seen) == 0  # where, not what
    other = tiny_base()
    changed = tmp_path / "mood.csv"
    shutil.copy(other["mixture"]["tasks"][0]["train"], changed)
    changed.write_text(changed.read_text() + "w1 w2,bad\n")
    other["mixture"]["tasks"][0]["train"] = str(changed)
    assert len(sweep(small(settings={"tiny": other}), tmp_path / "d", store).seen) == 4
    assert len(rows(store)) == 12


def test_a_killed_sweep_loses_no_finished_run(tmp_path: Path) -> None:
    store = tmp_path / "runs.csv"
    ended: list[str] = []

    def then_die(job: Job) -> Event:
        if len(ended) == 3:
            raise KeyboardInterrupt  # as kill -9: nothing is written any more
        ended.append(job.id)
        return finish(job)

    with pytest.raises(KeyboardInterrupt):
        sweep(small(), tmp_path / "runs", store, then_die)
    assert len(rows(store)) < 3  # what was written down; the rest is in the directories
    assert sweep(small(), tmp_path / "runs", store).seen == [
        run.id for run in small().runs() if run.id not in ended
    ]
    assert sorted(row["id"] for row in rows(store)) == sorted(run.id for run in small().runs())


def test_a_failed_run_is_not_stored(tmp_path: Path) -> None:
    store = tmp_path / "runs.csv"
    sweep(small(), tmp_path / "runs", store, fail)
    assert not store.exists() or rows(store) == []


def test_a_line_has_what_the_run_s_files_say(tmp_path: Path) -> None:
    store, out = tmp_path / "runs.csv", tmp_path / "runs"
    suite = tiny_suite(updates=4, methods={"gar": {"name": "gar", "coefficient": 0.25}},
                       set={"evaluation.every": 2, "device": "cpu"})  # fmt: skip
    with LocalExecutor(1, out / ".sweep") as executor:
        outcome = run_sweep(make_plan(suite, out, keep=Store(store)), executor, view=quiet())
    assert outcome.exit_code == 0
    (line,) = rows(store)
    directory = out / line["id"]
    result = json.loads((directory / RESULT).read_text())
    record = json.loads((directory / "sweep.json").read_text())
    environment = json.loads((directory / "environment.json").read_text())
    for name in ("load_variance", "nmi", "task_cosine", "observed_cosine", "gradient_mass_purity"):
        assert float(line[name]) == pytest.approx(result["routing"][name], rel=1e-4, abs=1e-12)
    for task, share in result["accuracy"]["tasks"].items():
        assert float(line[f"accuracy.{task}"]) == pytest.approx(share, rel=1e-5)
    assert float(line["accuracy"]) == pytest.approx(result["accuracy"]["macro"], rel=1e-5)
    assert line["configuration"] == record["configuration"][:16]
    assert line["hyperparameters"] == "coefficient=0.25"
    assert line["updates"] == "4"
    assert line["gar"] == environment["gar"]
    assert line["device"] == environment["device_name"]
    history = [json.loads(text) for text in (directory / "history.jsonl").read_text().splitlines()]
    (early,) = [entry for entry in history if "evaluation" in entry]
    (point,) = rows(tmp_path / "runs.trajectories.csv.gz")
    assert list(pd.read_csv(tmp_path / "runs.trajectories.csv.gz")["update"]) == [2]
    assert point["update"] == "2"
    assert all(point[name] == line[name] for name in KEY[:2])
    cosine = early["evaluation"]["routing"]["task_cosine"]
    assert float(point["task_cosine"]) == pytest.approx(cosine, rel=1e-3, abs=1e-12)


def test_a_line_says_whether_its_run_follows_a_suite(tmp_path: Path) -> None:
    suite = tiny_suite(methods={"own": {"name": "gar", "coefficient": 0.1, "objective": "numerator_only"}})
    (combination,) = suite.combinations()
    searched = {"optimizer.learning_rate": 0.00123456789012, "method.coefficient": 0.0234567890123}
    others: list[dict[str, Any]] = [{"optimizer.updates": 2}, {"mixture.batch_size": 4}]
    for number, changes in enumerate([searched, *others]):
        sweep(suite.replace(changes), tmp_path / str(number), tmp_path / "runs.csv")
    store = Store(tmp_path / "runs.csv")
    assert [follows(line, combination) for line in store.lines.values()] == [True, False, False]


def test_collect_takes_directories_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(small(), tmp_path / "a", tmp_path / "a.csv")
    other = tiny_suite(methods=["stgc"], seeds=1)
    sweep(other, tmp_path / "b", tmp_path / "b.csv")
    store = tmp_path / "all.csv"
    arguments = ["sweep", "collect", str(tmp_path / "a"), str(tmp_path / "b.csv"), "--store", str(store)]
    assert gar_command(arguments) == 0
    assert "5 runs, 5 of them new" in capsys.readouterr().out
    assert sorted(row["id"] for row in rows(store)) == sorted(
        run.id for suite in (small(), other) for run in suite.runs()
    )
    assert gar_command(arguments) == 0
    assert "5 runs, 0 of them new" in capsys.readouterr().out
    assert Store(store).lines == {**Store(tmp_path / "a.csv").lines, **Store(tmp_path / "b.csv").lines}


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"own\.csv: has no column id"):
        Store(tmp_path / "own.csv")
    with pytest.raises(UserError, match=r"\.csv"):
        Store(tmp_path / "runs.json")
    with pytest.raises(UserError, match=r"expected a file name"):
        Store(tmp_path / "runs.trajectories.csv.gz")
    for absent in ("absent.csv", "absent.csv.gz"):
        with pytest.raises(UserError, match="no such file"):
            collect([tmp_path / absent], Store(tmp_path / "runs.csv"))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"id\n")[:-3])
    (tmp_path / "b.csv.gz").write_bytes(b"id\n")
    (tmp_path / "c.csv").write_bytes(b"\xff")
    for damaged in ("a.csv.gz", "b.csv.gz", "c.csv"):
        with pytest.raises(UserError, match=f"{damaged}: is damaged"):
            Store(tmp_path / damaged)


def test_a_store_may_be_packed_and_its_trajectories_unpacked(tmp_path: Path) -> None:
    plain, unpacked, packed = (tmp_path / name / "runs.csv" for name in ("plain", "unpacked", "packed"))
    packed = packed.with_name("runs.csv.gz")
    (line, *_) = sweep_of_one(tmp_path, plain)
    points = plain.with_name("runs.trajectories.csv.gz")
    text = "id,configuration,update,nmi\n" + "".join(
        f"{line['id']},{line['configuration']},{update},0.5\n" for update in (1, 2)
    )
    points.write_bytes(gzip.compress(text.encode()))
    for source, target in ((plain, packed), (packed, unpacked), (unpacked, tmp_path / "last.csv.gz")):
        store = Store(target)
        assert collect([source], store) == 1
        assert rows(target) == rows(plain)
        written = target.with_name(f"{target.name.split('.')[0]}.trajectories.csv.gz")
        assert rows(written) == rows(points)
        before = target.read_bytes(), written.read_bytes()
        assert collect([source], Store(target)) == 0
        assert (target.read_bytes(), written.read_bytes()) == before
        if target == unpacked:  # as a person would, or an older version
            target.with_name("runs.trajectories.csv").write_bytes(gzip.decompress(written.read_bytes()))
            written.unlink()
    sweep(small(), tmp_path / "more", unpacked)  # what is written again is packed, and once
    assert not unpacked.with_name("runs.trajectories.csv").exists()
    assert rows(unpacked.with_name("runs.trajectories.csv.gz")) == rows(points)


def sweep_of_one(tmp_path: Path, store: Path) -> list[dict[str, str]]:
    sweep(tiny_suite(methods=["stgc"], seeds=1), tmp_path / "one", store)
    return rows(store)


def test_the_command_takes_a_part_of_a_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sweep", "evidence_frozen", "--out", str(tmp_path), "--dry-run"]
    assert (
        gar_command([*arguments, "--setting", "frozen_top1", "--mixture", "six_complete", "--method", "gar"])
        == 0
    )
    assert "10 runs, 10 to do" in capsys.readouterr().out
    assert gar_command([*arguments, "--setting", "frozen_top2"]) == 2
    assert "frozen_top" in capsys.readouterr().err
    assert gar_command([*arguments, "--chosen", str(tmp_path)]) == 2
    assert "chosen_from" in capsys.readouterr().err
    assert state_of(tmp_path / "frozen_top1") is State.NEW
    command = ["search", "evidence_frozen", "--mixture", "nowhere", "--out", str(tmp_path / "search")]
    assert gar_command(command) == 2
    assert "six_complete" in capsys.readouterr().err


# ---------------------------------------------------------------------- tasks as files


def test_exported_tasks_are_the_same_examples(tmp_path: Path) -> None:
    lines = [{"input": f"text {i}", "label": ("a", "b")[i % 2]} for i in range(30)]
    source = tmp_path / "source" / "hyperbaton"
    source.mkdir(parents=True)
    for split in ("train", "validation"):
        (source / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = load(["hyperbaton"], data_dir=tmp_path / "source", max_train_examples=12)  # not from BIG-bench
    written = export(first, tmp_path / "out")
    assert {path.name: count for path, count in written.items()} == {
        "train.jsonl.gz": 12, "validation.jsonl.gz": 30,
    }  # fmt: skip
    again = load(["hyperbaton"], data_dir=tmp_path / "out", max_train_examples=12)
    for mine, theirs in ((first.tasks[0].train, again.tasks[0].train),
                         (first.tasks[0].validation, again.tasks[0].validation)):  # fmt: skip
        assert mine.texts == theirs.texts
        assert mine.labels.tolist() == theirs.labels.tolist()
    before = {path: path.read_bytes() for path in written}
    export(first, tmp_path / "out")
    assert {path: path.read_bytes() for path in written} == before
    known = identity(MixtureConfig(tasks=("hyperbaton",)), tmp_path / "out")
    assert known != identity(MixtureConfig(tasks=("hyperbaton",)), tmp_path / "source")


def test_pairs_and_the_hub_s_indices_survive_the_export(tmp_path: Path) -> None:
    source = tmp_path / "source" / "rte"
    source.mkdir(parents=True)
    for split in ("train", "validation"):
        rte = [{"sentence1": f"a {i}", "sentence2": "b", "label": i % 2} for i in range(6)]
        (source / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rte))
    first = load(["rte"], data_dir=tmp_path / "source")
    export(first, tmp_path / "out")
    again = load(["rte"], data_dir=tmp_path / "out")
    assert again.tasks[0].train.pairs == first.tasks[0].train.pairs == ["b"] * 6
    assert again.tasks[0].train.labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_a_task_of_one_s_own_is_not_exported(tmp_path: Path) -> None:
    mixture = load_mixture(MixtureConfig.model_validate(tiny_base()["mixture"]))
    with pytest.raises(UserError, match="'mood': cannot be exported"):
        export(mixture, tmp_path)


# ---------------------------------------------------------------------- a time slice


def slice_of(tmp_path: Path, *words: str, seconds: int = 60) -> list[str]:
    """Run benchmarks/evidence.sh with a stand-in for gar; the commands that it was given."""
    log, stand_in = tmp_path / "commands.txt", tmp_path / "gar"
    stand_in.write_text(
        "#!/usr/bin/env bash\n"
        f'echo "$*" >> {log}\n'
        'while [ "$1" != "--out" ]; do shift; done\n'
        'mkdir -p "$2/frozen_top1/six_complete/gar/.candidates/k/seed-1000"\n'
        'echo x > "$2/frozen_top1/six_complete/gar/chosen.yaml"\n'
        'echo x > "$2/frozen_top1/six_complete/gar/.candidates/k/seed-1000/result.json"\n'
        'echo x > "$2/frozen_top1/six_complete/gar/.candidates/k/seed-1000/history.jsonl"\n'
    )
    stand_in.chmod(0o755)
    places = {"DATA": "data", "KEPT": "kept", "OUT": "out", "WORK": "scratch", "GAR": "gar"}
    environment = os.environ | {name: str(tmp_path / place) for name, place in places.items()}
    script = ROOT / "benchmarks" / "evidence.sh"
    subprocess.run([str(script), str(seconds), *words], env=environment, check=True, capture_output=True)
    return log.read_text().splitlines() if log.exists() else []


def test_a_slice_goes_on_with_what_the_last_one_kept(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for name in ("evidence.csv", "evidence_pairs.csv.gz"):
        (tmp_path / "kept" / name).write_text("id\n")
    commands = slice_of(tmp_path, "search", "pairs", "trained_ffn", "--method=gar", "optimizer.updates=7")
    assert [command.split()[0] for command in commands] == ["search", "sweep", "sweep"]
    assert all(command.endswith("--method=gar optimizer.updates=7") for command in commands)
    pairs, trained = commands[1:]
    assert f"evidence_pairs --chosen {tmp_path}/scratch/chosen" in pairs
    assert "--chosen" not in trained
    assert f"--store {tmp_path}/out/evidence_pairs.csv.gz " in pairs
    assert f"--store {tmp_path}/out/evidence.csv " in trained
    for name in ("evidence.csv", "evidence_pairs.csv.gz"):
        assert (tmp_path / "out" / name).read_text() == "id\n"
    assert (tmp_path / "scratch/chosen/frozen_top1/six_complete/gar/chosen.yaml").is_file()
    with tarfile.open(tmp_path / "out" / "search.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"chosen.yaml", "result.json"} <= names
    assert "history.jsonl" not in names
    shutil.rmtree(tmp_path / "scratch")
    slice_of(tmp_path, "pairs")  # another machine: the choices come out of the archive
    assert (tmp_path / "scratch/chosen/frozen_top1/six_complete/gar/chosen.yaml").is_file()


def test_a_slice_without_time_starts_nothing(tmp_path: Path) -> None:
    assert slice_of(tmp_path, "search", "pairs", seconds=16) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda text: text.rstrip("\n").rpartition(",")[0] + "\n",
            "line 2: is damaged; expected as many",
        ),
        (lambda text: text.replace("0.5,", "half,"), "line 2: learning_rate is 'half'; expected a number"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: Callable[[str], str], said: str) -> None:
    path = tmp_path / "runs.csv"
    head = ["id", "configuration", "data", "learning_rate", "clip", "weight_decay", "updates", "accuracy"]
    text = f"{','.join(head)}\nx,c,d,0.5,1,0,10,0.7\n"
    path.write_text(text, encoding="utf-8")
    assert len(read_lines(path, head)) == 1
    path.write_text(damage(text), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        read_lines(path, head)
