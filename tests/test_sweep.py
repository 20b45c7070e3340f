"""Sweeps: the coordinator against a stand-in executor, and against real worker processes on a tiny model."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from gar.cli import sweep as cli
from gar.cli.app import run as command_line
from gar.config import build
from gar.errors import UserError
from gar.runs.directory import checkpoints, write_failure
from gar.runs.files import read_json
from gar.runs.names import CHECKPOINTS, CONFIG, FAILURE, RESULT
from gar.runs.packing import pack, unpack
from gar.runs.state import State, state_of
from gar.runs.stopping import StopSignals
from gar.sweeps import store
from gar.sweeps.executors import Event, Job, available_cores, drive, threads_of
from gar.sweeps.local import GpuUse, LocalExecutor, describe_exit, fitting_jobs, gpu_memory
from gar.sweeps.progress import View
from gar.sweeps.store import hold
from gar.sweeps.suite import Suite, build_suite, load_suite
from gar.sweeps.sweep import Status, make_plan, read_status, run_sweep
from gar.training import train_from_config
from support.sweeps import (
    StandIn,
    directories,
    fail,
    finish,
    own_method,
    quiet,
    tiny_base,
    tiny_suite,
    tiny_world,
)
from support.tiny_runs import small_file_system
from support.waiting import until

# ---------------------------------------------------------------------- the coordinator


def test_a_sweep_runs_all_and_then_nothing(tmp_path: Path) -> None:
    suite = tiny_suite(methods=["baseline", "gar"], seeds=3)
    executor = StandIn(finish)
    outcome = run_sweep(make_plan(suite, tmp_path), executor, view=quiet())
    assert (outcome.finished, outcome.failed, outcome.exit_code) == (6, 0, 0)
    assert executor.seen == [run.id for run in suite.runs()]
    assert executor.most == 2
    again = make_plan(suite, tmp_path)
    assert (again.remaining, again.states[State.FINISHED]) == (0, 6)
    executor = StandIn(finish)
    assert run_sweep(again, executor, view=quiet()).exit_code == 0
    assert executor.seen == []


def test_failures_are_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    suite = tiny_suite(methods=["baseline", "gar"], seeds=3)
    bad = {"tiny/mood+nli/baseline/seed-1", "tiny/mood+nli/gar/seed-2"}
    outcome = run_sweep(
        make_plan(suite, tmp_path), StandIn(lambda j: fail(j) if j.id in bad else finish(j)), view=quiet()
    )
    assert (outcome.finished, outcome.failed, outcome.exit_code) == (4, 2, 1)
    status = read_status(tmp_path)
    assert set(status.failures) == bad
    assert status.cells == {("tiny", "mood+nli"): Counter(finished=4, failed=2)}
    # Left alone without --retry-failed, but still said by the exit code.
    executor = StandIn(finish)
    assert run_sweep(make_plan(suite, tmp_path), executor, view=quiet()).exit_code == 1
    assert executor.seen == []
    executor = StandIn(finish)
    assert run_sweep(make_plan(suite, tmp_path, retry_failed=True), executor, view=quiet()).exit_code == 0
    assert set(executor.seen) == bad


def test_unfinished_runs_go_on_and_failed_ones_start_anew_with_another_configuration(tmp_path: Path) -> None:
    suite = tiny_suite(seeds=2)
    first, second = directories(suite, tmp_path)
    for directory, run in zip((first, second), suite.runs(), strict=True):
        store.begin(directory, run, retry=False)
        (directory / CONFIG).write_text(yaml.safe_dump(run.tree()))
        (directory / CHECKPOINTS / "00000002").mkdir(parents=True)
    write_failure(second, "Broken", "no luck")
    assert read_json(second / FAILURE)["checkpoint"] == "checkpoints/00000002"
    plan = make_plan(suite, tmp_path)
    assert (plan.states[State.UNFINISHED], plan.states[State.FAILED], plan.remaining) == (1, 1, 1)
    changed = suite.replace({"optimizer.updates": 9})
    with pytest.raises(UserError, match=r"optimizer\.updates was 3 and is 9.*expected another --out"):
        make_plan(changed, tmp_path, retry_failed=True)
    kept = [(d / CHECKPOINTS).is_dir() for d in (first, second)]
    assert kept == [True, True]
    (first / CONFIG).unlink()
    (first / store.RECORD).unlink()
    seen: list[bool] = []

    def look(job: Job) -> Event:
        seen.append((job.out / CHECKPOINTS).is_dir() or (job.out / FAILURE).is_file())
        return finish(job)

    run_sweep(make_plan(changed, tmp_path, retry_failed=True), StandIn(look, slots=1), view=quiet())
    assert seen == [True, False]  # the second one's old checkpoints belong to other weights


def test_a_finished_run_of_another_configuration_is_not_taken_for_ours(tmp_path: Path) -> None:
    suite = tiny_suite()
    run_sweep(make_plan(suite, tmp_path), StandIn(finish), view=quiet())
    assert make_plan(suite.replace({"device": "cuda", "checkpoint.every": 5}), tmp_path).remaining == 0
    with pytest.raises(UserError, match=r"optimizer\.updates was 3 and is 4"):
        make_plan(suite.replace({"optimizer.updates": 4}), tmp_path)
    (next(directories(suite, tmp_path)) / store.RECORD).unlink()  # as `gar train --out` leaves it
    assert make_plan(suite, tmp_path).remaining == 0
    with pytest.raises(UserError, match="another configuration"):
        make_plan(suite.replace({"optimizer.updates": 4}), tmp_path)


def test_a_configuration_that_cannot_run_fails_alone(tmp_path: Path) -> None:
    suite = tiny_suite(methods=["baseline", "stgc"], set={"experts.site": "full_ffn"}, seeds=2)
    plan = make_plan(suite, tmp_path)
    assert list(plan.refused) == ["tiny/mood+nli/stgc"]
    outcome = run_sweep(plan, StandIn(finish), view=quiet())
    assert (outcome.finished, outcome.failed, outcome.exit_code) == (2, 2, 1)
    assert "full_ffn" in read_status(tmp_path).failures["tiny/mood+nli/stgc/seed-1"]
    assert run_sweep(make_plan(suite, tmp_path), StandIn(finish), view=quiet()).exit_code == 1
    with pytest.raises(UserError, match=r"unknown key 'optimizer\.updatess'; did you mean 'updates'"):
        make_plan(suite.replace({"optimizer.updatess": 3}), tmp_path)


def test_the_estimate_comes_from_like_runs(tmp_path: Path) -> None:
    suite = tiny_suite(methods=["baseline", "gar"], seeds=4)
    plan = make_plan(suite, tmp_path)
    assert plan.estimate(2) == (0.0, 8)
    executor = StandIn(finish)  # 2 seconds each
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(executor.seen) >= 3

    outcome = run_sweep(plan, executor, view=quiet(), stopping=stop)
    assert (outcome.interrupted, outcome.exit_code) == (True, 130)
    plan = make_plan(suite, tmp_path)
    assert plan.states[State.FINISHED] == outcome.finished
    assert plan.estimate(2) == ((8 - outcome.finished) * 2.0 / 2, 0)


def test_stopping_submits_nothing_more(tmp_path: Path) -> None:
    executor = StandIn(finish)
    jobs = (Job(str(i), {}, tmp_path) for i in range(10))
    for i in range(10):
        (tmp_path / str(i)).mkdir()
    events = list(drive(executor, jobs, lambda: len(executor.seen) >= 4))
    ends = [event.kind for event in events if event.ends]
    assert len(executor.seen) == len(ends) == 4
    assert ends[-1] == "interrupted"


def test_a_retry_starts_without_the_old_failure_and_keeps_the_new_one(tmp_path: Path) -> None:
    suite = tiny_suite()
    (directory,) = directories(suite, tmp_path)
    run_sweep(make_plan(suite, tmp_path), StandIn(lambda job: fail(job, "the first")), view=quiet())
    states: list[Status] = []

    def die(job: Job) -> Event:
        store.write_running(tmp_path, {job.id: {"stage": "starting"}})
        states.append(read_status(tmp_path))
        return fail(job, "the second")

    run_sweep(make_plan(suite, tmp_path, retry_failed=True), StandIn(die), view=quiet())
    assert [(state.failures, list(state.running)) for state in states] == [({}, [next(suite.runs()).id])]
    assert read_status(tmp_path).failures == {next(suite.runs()).id: "the second"}
    record = read_json(directory / store.RECORD)
    assert record is not None
    assert (record["attempts"], record["seconds"]) == (2, 2.0)


def test_what_training_wrote_of_a_failure_stays(tmp_path: Path) -> None:
    write_failure(tmp_path, "TrainingFailure", "update 3: no luck", 3)
    store.note_failure(tmp_path, "Killed", "the worker process was killed by SIGKILL")
    assert (read_json(tmp_path / FAILURE) or {})["update"] == 3
    (tmp_path / FAILURE).unlink()
    store.note_failure(tmp_path, "Killed", "the worker process was killed by SIGKILL")
    assert (read_json(tmp_path / FAILURE) or {})["error"] == "Killed"


def test_runs_on_other_features_or_data_are_not_taken_for_ours(tmp_path: Path) -> None:
    world = shutil.copytree(tiny_world(), tmp_path / "world")
    text = json.dumps(tiny_base()["mixture"]).replace(str(tiny_world()), str(world))
    base = {**tiny_base(), "mixture": json.loads(text)}
    suite = build_suite({"settings": {"tiny": base}}, "tiny", tmp_path)
    out = tmp_path / "out"
    run_sweep(make_plan(suite, out), StandIn(finish), view=quiet())
    with pytest.raises(
        UserError, match=r"cache\.dtype was 'float32' and is 'float16'.*expected another --out"
    ):
        make_plan(suite.replace({"cache.dtype": "float16"}), out)
    assert make_plan(suite.replace({"cache.directory": str(tmp_path), "data_dir": "/x"}), out).remaining == 0
    assert make_plan(tiny_suite(), out).remaining == 0  # the same files elsewhere
    with (world / "mood-train.csv").open("a") as file:
        file.write("w1 w2,good\n")
    suite = suite.replace({})  # as a new command reads it
    with pytest.raises(
        UserError, match=r"the examples of task mood are not the same.*expected another --out"
    ):
        make_plan(suite, out)


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tiny_base()))
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"settings": ["own.yaml"]}))
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "out")
    for arguments in (["sweep", str(tmp_path / "s.yaml")], ["search", str(tmp_path / "own.yaml")]):
        assert command_line([*arguments, "--out", out]) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("error: ")
        assert "Not a directory; finished runs are kept" in last


def test_two_sweeps_do_not_share_a_directory(tmp_path: Path) -> None:
    with hold(tmp_path), pytest.raises(UserError, match="another sweep or search is running"):
        run_sweep(make_plan(tiny_suite(), tmp_path), StandIn(finish), view=quiet())


def test_a_plan_of_ten_thousand_runs_builds_no_configuration_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tiny_suite(
        methods=["baseline", "gar"],
        seeds=50,
        overrides={f"n{i}": {"optimizer.updates": i + 1} for i in range(100)},
    )
    built = 0

    def counted(*arguments: Any) -> Any:
        nonlocal built
        built += 1
        return build(*arguments)

    monkeypatch.setattr("gar.config.build", counted)
    plan = make_plan(suite, tmp_path)
    assert (plan.total, plan.remaining, len(suite)) == (10_000, 10_000, 10_000)
    assert built <= 200  # 2 methods and 100 overrides; 50 seeds are one configuration
    assert len(plan.cells) == 1


def test_a_run_travels_as_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "model").mkdir(parents=True)
    (source / "checkpoints" / "00000001").mkdir(parents=True)
    for name in (
        "config.yaml",
        "result.json",
        "history.jsonl",
        "model/config.json",
        "checkpoints/00000001/state.json",
    ):
        (source / name).write_text(name)
    unpack(pack(source, model=True), tmp_path / "all")
    assert (tmp_path / "all" / "model" / "config.json").read_text() == "model/config.json"
    assert not (tmp_path / "all" / "checkpoints").exists()
    unpack(pack(source, model=False), tmp_path / "light")
    assert sorted(p.name for p in (tmp_path / "light").iterdir()) == [
        "config.yaml",
        "history.jsonl",
        "result.json",
    ]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("model/../../outside", "x")
    with pytest.raises(ValueError, match="unexpected file"):
        unpack(content.getvalue(), tmp_path / "evil")


def test_the_newest_checkpoint_travels_on_demand(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for number in ("00000002", "00000004"):
        (source / CHECKPOINTS / number).mkdir(parents=True)
        (source / CHECKPOINTS / number / "state.json").write_text(number)
    (source / CHECKPOINTS / ".00000006.partial").mkdir()
    (source / CONFIG).write_text("seed: 0")
    (target / CHECKPOINTS / "00000001").mkdir(parents=True)
    unpack(pack(source, checkpoint=True), target)
    assert [path.name for path in (target / CHECKPOINTS).iterdir()] == ["00000004"]
    assert (target / CHECKPOINTS / "00000004" / "state.json").read_text() == "00000004"
    assert pack(source) != pack(source, checkpoint=True)
    (source / RESULT).write_text("{}")
    unpack(pack(source), target)  # finished: its checkpoints are of no more use
    assert not (target / CHECKPOINTS).exists()


def test_a_full_disk_leaves_no_partial_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / CHECKPOINTS / "00000002").mkdir(parents=True)
    (source / CHECKPOINTS / "00000002" / "model.safetensors").write_bytes(os.urandom(1 << 20))
    (source / CONFIG).write_text("seed: 0")
    with small_file_system(tmp_path / "small", "256k") as small:
        (small / store.SWEEP).mkdir()
        with pytest.raises(OSError, match="No space"):
            unpack(pack(source, checkpoint=True), small / "run")
        with pytest.raises(OSError, match="No space"):
            store.write_planned(small, "many", ("x" * 1000 for _ in range(1000)))
        left = sorted(path.relative_to(small).as_posix() for path in small.rglob("*") if path.is_file())
        assert left == ["run/config.yaml"]
        assert list((small / "run" / CHECKPOINTS).iterdir()) == []


def test_exit_statuses_in_words() -> None:
    assert describe_exit(-9, False) == ("Killed", "the worker process was killed by SIGKILL")
    assert describe_exit(-9, True)[0] == "OutOfMemory"
    assert describe_exit(3, False)[0] == "Exited"


def test_out_of_memory_is_recognised() -> None:
    from gar.sweeps._worker import out_of_memory

    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"))
    assert not out_of_memory(RuntimeError("shapes differ"))


def test_the_first_signal_asks_and_the_second_acts() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


# ---------------------------------------------------------------------- worker processes, without a model


class Pretended(LocalExecutor):
    work = "support.pretender:pretend"


def play(executor: LocalExecutor, names: list[str], out: Path, **options: Any) -> dict[str, Event]:
    jobs = (Job(name, {}, out / name) for name in names)
    events = list(drive(executor, jobs, options.get("stopping", lambda: False)))
    return {event.job.id: event for event in events if event.ends}


def test_workers_die_and_are_replaced(tmp_path: Path) -> None:
    names = ["good-1", "killed-1", "good-2", "broken-1", "good-3", "exits-1", "good-4"]
    with Pretended(1, tmp_path / "logs") as executor:
        ends = play(executor, names, tmp_path)
        assert executor.busy == 0
    assert [ends[name].kind for name in names] == ["finished", "failed"] * 3 + ["finished"]
    reasons = [ends[f"{what}-1"].facts["reason"] for what in ("killed", "broken", "exits")]
    assert reasons[0] == "the worker process was killed by SIGKILL"
    assert reasons[1] == "strange"
    assert "exit status 3" in reasons[2]
    told = read_json(tmp_path / "killed-1" / FAILURE)
    assert told == {"error": "Killed", "reason": reasons[0], "update": None, "checkpoint": None}
    assert len({ends[f"good-{i}"].facts["accuracy"] for i in range(1, 5)}) == 4  # process ids


def test_a_worker_serves_one_job_after_another(tmp_path: Path) -> None:
    with Pretended(2, tmp_path / "logs") as executor:
        ends = play(executor, [f"good-{i}" for i in range(20)], tmp_path)
    assert len(ends) == 20
    assert len({event.facts["accuracy"] for event in ends.values()}) <= 2


PART, WHOLE, NONE = GpuUse.PART, GpuUse.WHOLE, GpuUse.NONE


@pytest.mark.parametrize(
    ("uses", "free", "cores", "jobs"),
    [
        ({PART}, [80], 16, 3),
        ({PART, NONE}, [80], 16, 3),
        ({PART}, [80], 2, 2),  # a core for each
        ({PART}, [80], 1, 1),
        ({PART}, [25], 16, 2),  # memory for each
        ({PART}, [8], 16, 1),
        ({PART}, [0], 16, 1),  # unknown
        ({PART}, [80, 80], 16, 6),
        ({PART}, [80, 0], 16, 2),
        ({PART}, [80] * 8, 16, 16),
        ({WHOLE}, [80], 16, 1),
        ({PART, WHOLE}, [80, 80], 16, 2),
        ({NONE}, [80], 16, 1),
        (set(), [80], 16, 1),
        ({PART}, [], 16, 1),
    ],
)
def test_by_default_runs_fill_the_gpus(
    uses: set[GpuUse], free: list[int], cores: int, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert fitting_jobs(uses, [gib << 30 for gib in free], cores) == jobs


def test_processes_that_share_a_gpu_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    assert fitting_jobs({PART}, [140 << 30], 16) == 6
    assert fitting_jobs({PART}, [30 << 30], 16) == 2
    assert fitting_jobs({PART, WHOLE}, [140 << 30], 16) == 1


@pytest.mark.parametrize(
    ("changes", "use"),
    [
        ({}, PART),
        ({"device": "cuda"}, PART),
        ({"device": "cpu"}, NONE),
        ({"cache.enabled": False}, WHOLE),
        ({"backbone.trainable": True}, WHOLE),
        ({"backbone.trainable": True, "device": "cpu"}, NONE),
    ],
)
def test_what_a_run_takes_of_a_gpu(tmp_path: Path, changes: dict[str, Any], use: GpuUse) -> None:
    suite = tiny_suite(set={"device": "auto", **changes})
    assert make_plan(suite, tmp_path).uses == {use}


def test_free_memory_is_that_of_the_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0, GPU-aa, 81000\necho 1, GPU-bb, 500\necho 2, GPU-cc, [N/A]")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb, 0,GPU-cc,MIG-x")
    assert gpu_memory() == [500 << 20, 81000 << 20, 0, 0]
    tool.write_text("#!/bin/sh\nexit 9")
    assert gpu_memory() == [0, 0, 0, 0]
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory() == [0, 0, 0, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_memory() == []


def test_workers_stop_when_asked(tmp_path: Path) -> None:
    with Pretended(2, tmp_path / "logs") as executor:
        seen: list[int] = []

        def stopping() -> bool:
            seen.append(executor.busy)
            return len(seen) > 8

        ends = play(executor, ["waits-1", "waits-2", "good-1"], tmp_path, stopping=stopping)
    assert {name: event.kind for name, event in ends.items()} == {
        "waits-1": "interrupted",
        "waits-2": "interrupted",
    }
    assert not (tmp_path / "waits-1" / FAILURE).exists()


def told_by_worker(executor: LocalExecutor, tmp_path: Path, **config: Any) -> dict[str, Any]:
    """What a worker sees, see ``support.pretender``."""
    executor.submit(Job("tells-1", config, tmp_path))
    while True:
        for event in executor.events(60):
            if event.ends:
                return event.facts


def test_threads_are_those_of_a_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_of({}, 3) == int(os.environ.get("OMP_NUM_THREADS", 3))
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert (threads_of({"threads": 7}, 3), threads_of({"threads": None}, 3)) == (7, 5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (threads_of({"threads": 7}, 3), threads_of({"threads": None}, 3)) == (7, 3)
    with Pretended(1, tmp_path / "logs") as executor:
        first = told_by_worker(executor, tmp_path)
        again = told_by_worker(executor, tmp_path)
        other = told_by_worker(executor, tmp_path, threads=available_cores() + 1)
    shares = [facts["OMP_NUM_THREADS"] for facts in (first, again, other)]
    assert shares == [str(available_cores()), str(available_cores()), str(available_cores() + 1)]
    assert other["RAYON_NUM_THREADS"] == str(available_cores() + 1)
    assert first["pid"] == again["pid"] != other["pid"]  # libraries read the number when they are imported
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with Pretended(2, tmp_path / "logs") as executor:
        assert told_by_worker(executor, tmp_path)["OMP_NUM_THREADS"] == "3"


def test_a_worker_is_a_session_of_its_own_with_the_callers_modules(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    try:
        with Pretended(1, tmp_path / "logs") as executor:
            facts = told_by_worker(executor, tmp_path)
    finally:
        sys.path.remove(str(tmp_path))
    assert facts["session"] == facts["pid"] != os.getsid(0)
    assert str(tmp_path) in facts["path"]
    assert (facts["cwd"], facts["main"]) == (os.getcwd(), None)


SCRIPT = """
from pathlib import Path
from gar.sweeps.executors import Job, drive
from gar.sweeps.local import LocalExecutor
print("once")
LocalExecutor.work = "support.pretender:pretend"
executor = LocalExecutor(2, Path("logs"))
jobs = iter([Job("good-1", {}, Path("x")), Job("good-2", {}, Path("y"))])
print(sum(event.kind == "finished" for event in drive(executor, jobs, lambda: False)))
"""


def test_a_script_of_ones_own_is_not_run_again_by_workers(tmp_path: Path) -> None:
    """Without the usual ``if __name__ == "__main__"``, and without closing the executor."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["once", "2"]


# ---------------------------------------------------------------------- real workers


def test_a_plugin_reaches_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_methods.py").write_text(own_method(monkeypatch, "swept"))
    (tmp_path / "s.yaml").write_text(
        yaml.safe_dump(
            {"settings": {"own": {**tiny_base(), "plugins": ["my_methods"]}}, "methods": ["swept"]}
        )
    )
    suite, out = load_suite(tmp_path / "s.yaml"), tmp_path / "out"
    with LocalExecutor(1, out / store.SWEEP) as executor:
        outcome = run_sweep(make_plan(suite, out), executor, view=quiet())
    assert outcome.finished == 1, read_status(out).failures
    assert (read_json(out / "own/mood+nli/swept/seed-0" / RESULT) or {})["method"] == "swept"


def failing_suite(seeds: int) -> Suite:
    """Of its runs per seed, one becomes non-finite, one's data are missing and the rest are good."""
    return tiny_suite(
        methods=["baseline", "gar"],
        seeds=seeds,
        set={"checkpoint.every": 2, "threads": 1},
        overrides={
            "plain": {},
            "slow": {"optimizer.updates": 4},
        },
    )


def sabotage(job: Job) -> Job:
    """The three that are to fail: a non-finite loss, a missing file, a worker killed in a long run."""
    config = json.loads(json.dumps(job.config))
    if job.id == "tiny/mood+nli/gar-plain/seed-0":
        config["optimizer"] |= {"learning_rate": 1e30, "updates": 20, "clip": 1e30}
    elif job.id == "tiny/mood+nli/gar-slow/seed-0":
        config["mixture"]["tasks"][0]["train"] = "/nowhere/at/all.csv"
    elif job.id == "tiny/mood+nli/baseline-slow/seed-1":
        config["optimizer"]["updates"] = 100_000
    return replace(job, config=config)


class Sabotaged(LocalExecutor):
    """Spoils three jobs on the way, and kills the worker of the third once it has a checkpoint."""

    def __init__(self, out: Path) -> None:
        super().__init__(1, out / store.SWEEP)
        self.out = out

    def submit(self, job: Job) -> None:
        super().submit(sabotage(job))

    def events(self, timeout: float) -> list[Event]:
        victim = "tiny/mood+nli/baseline-slow/seed-1"
        for worker in self._workers:
            if worker.job and worker.job.id == victim and checkpoints(self.out / victim / CHECKPOINTS):
                worker.process.kill()
        return super().events(timeout)


def check_failing_sweep(out: Path, seeds: int) -> None:
    suite = failing_suite(seeds)
    plan = make_plan(suite, out)
    with Sabotaged(out) as executor:
        outcome = run_sweep(plan, executor, view=quiet(), keep_models=False)
    assert (outcome.finished, outcome.failed, outcome.exit_code) == (4 * seeds - 3, 3, 1)
    failures = read_status(out).failures
    assert len(failures) == 3
    reason = failures["tiny/mood+nli/gar-plain/seed-0"]
    assert "not finite" in reason or "is nan" in reason or "is inf" in reason
    told = read_json(out / "tiny/mood+nli/gar-plain/seed-0" / FAILURE)
    assert told is not None
    assert told["update"] >= 1  # training's own record stays
    assert "/nowhere/at/all.csv: no such file" in failures["tiny/mood+nli/gar-slow/seed-0"]
    killed = failures["tiny/mood+nli/baseline-slow/seed-1"]
    assert killed.startswith("the worker process was killed by SIGKILL (last checkpoint: checkpoints/0")
    result = read_json(out / "tiny/mood+nli/gar-plain/seed-1" / RESULT)
    assert result is not None
    assert result["method"] == "gar"
    assert result["seed"] == 1
    assert not (out / "tiny/mood+nli/gar-plain/seed-1" / "model").exists()
    assert not (out / "tiny/mood+nli/gar-plain/seed-1" / CHECKPOINTS).exists()


def test_three_of_eight_runs_fail_for_real(tmp_path: Path) -> None:
    check_failing_sweep(tmp_path, seeds=2)
    # Without the sabotage they succeed; the killed one had another number of updates, so it starts anew.
    for name in read_status(tmp_path).failures:
        (tmp_path / name / CONFIG).unlink(missing_ok=True)
        shutil.rmtree(tmp_path / name / CHECKPOINTS, ignore_errors=True)
    plan = make_plan(failing_suite(2), tmp_path, retry_failed=True)
    assert plan.remaining == 3
    with LocalExecutor(1, tmp_path / store.SWEEP) as executor:
        outcome = run_sweep(plan, executor, view=quiet())
    assert (outcome.finished, outcome.failed) == (8, 0)
    # A worker that ran other jobs before gets what a run of its own gets, bit for bit.
    run = next(r for r in failing_suite(2).runs() if r.id == "tiny/mood+nli/gar-slow/seed-1")
    alone = train_from_config(build(run.tree()), tmp_path / "alone")
    swept = read_json(tmp_path / run.id / RESULT)
    assert swept is not None
    assert {**alone, "timing": 0} == {**swept, "timing": 0}
    histories = [(d / "history.jsonl").read_text() for d in (tmp_path / "alone", tmp_path / run.id)]
    assert histories[0] == histories[1]


@pytest.mark.slow
def test_three_of_forty_runs_fail_for_real(tmp_path: Path) -> None:
    check_failing_sweep(tmp_path, seeds=10)


def test_an_interrupted_sweep_checkpoints_and_goes_on(tmp_path: Path) -> None:
    """Through the command line, with a signal, as a user does it."""
    tree = {"settings": {"tiny": tiny_base(4000)}, "seeds": 2}
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(tree))
    out = tmp_path / "runs"
    verb = ["-c", "from gar.cli import main; main()", "sweep"]
    command = [sys.executable, *verb, str(tmp_path / "long.yaml"), "--out", str(out)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        first = out / "tiny/mood+nli/gar/seed-0"
        history = first / "history.jsonl"
        until(lambda: process.poll() is not None or (history.is_file() and len(history.read_bytes()) > 500))
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends Ctrl-C
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "0 finished, 0 failed, 2 to do; start again to go on" in output
    assert "stopped tiny/mood+nli/gar/seed-0" in errors
    assert state_of(first) is State.UNFINISHED
    (checkpoint,) = (first / CHECKPOINTS).glob("[0-9]*")
    assert int(checkpoint.name) > 0
    assert make_plan(build_suite(tree, "long", tmp_path), out).remaining == 2


def test_a_worker_without_coordinator_checkpoints_and_leaves(tmp_path: Path) -> None:
    """As after kill -9 of the coordinator: the worker's pipe ends."""
    out = tmp_path / "run"
    with LocalExecutor(1, tmp_path / "logs") as executor:
        executor.submit(Job("x", build(tiny_base(100_000)).to_dict(), out))
        while not any(event.facts.get("stage") == "update" for event in executor.events(60)):
            pass
        (worker,) = executor._workers
        worker.connection.close()
        worker.process.join(60)
        assert worker.process.exitcode == 0
    assert len(list((out / CHECKPOINTS).glob("[0-9]*"))) == 1
    assert state_of(out) is State.UNFINISHED


# ---------------------------------------------------------------------- the command line


def test_the_live_view_draws(tmp_path: Path) -> None:
    screen = io.StringIO()
    with View(4, 1, Console(file=screen, force_terminal=True, width=120)) as view:
        jobs = [Job(f"tiny/five/gar/seed-{i}", {}, tmp_path) for i in range(3)]
        for job in jobs:
            view.follow(Event(job, "started"))
        view.follow(Event(jobs[0], "progress", {"stage": "update", "done": 2, "total": 9, "loss": 0.25}))
        view.follow(Event(jobs[1], "finished", {"accuracy": 0.75, "seconds": 61.0}))
        view.follow(Event(jobs[2], "failed", {"reason": "no [luck]", "seconds": 1.0}))
    drawn = screen.getvalue()
    assert "[2/4] finished tiny/five/gar/seed-1 in 1 min 1 s, accuracy 0.7500" in drawn
    assert "FAILED tiny/five/gar/seed-2 in 1 s: no [luck]" in drawn
    assert "update 2/9" in drawn
    assert "1 failed" in drawn
    assert view.now.keys() == {jobs[0].id}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "none"
    result = invoke("paper_head", "--dry-run", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "175 runs, 175 to do" in result.output
    assert "unknown for 175 runs" in result.output
    assert not out.exists()
    assert invoke("--dry-run", "run").exit_code != 0  # no suite of this name


def test_status_reads_what_a_sweep_left(tmp_path: Path) -> None:
    suite = tiny_suite(methods=["baseline", "gar"], seeds=2)
    bad = "tiny/mood+nli/gar/seed-1"
    run_sweep(
        make_plan(suite, tmp_path), StandIn(lambda j: fail(j) if j.id == bad else finish(j)), view=quiet()
    )
    store.write_running(tmp_path, {})
    result = invoke("status", str(tmp_path))
    assert result.exit_code == 0
    assert f"failed {bad}: no luck" in result.output
    tree = json.loads(invoke("status", str(tmp_path), "--format", "json").output)
    assert tree["cells"] == [{"setting": "tiny", "mixture": "mood+nli", "finished": 3, "failed": 1}]
    (tmp_path / bad / FAILURE).unlink()
    with hold(tmp_path):
        store.write_running(tmp_path, {bad: {"stage": "update", "done": 2, "total": 3}})
        assert "running tiny/mood+nli/gar/seed-1: update 2/3" in invoke("status", str(tmp_path)).output
    # Without a living sweep nothing runs, whatever the clock says.
    assert read_status(tmp_path).running == {}
    assert read_status(tmp_path).cells["tiny", "mood+nli"] == Counter(finished=3, unfinished=1)
    with pytest.raises(UserError, match="no sweep was started here"):
        read_status(tmp_path / "elsewhere")


def test_ls_lists_the_packaged_suites() -> None:
    output = invoke("ls").output
    assert "paper_main" in output
    assert "525" in output
    assert "bigbench" in output
