# SPDX-License-Identifier: Apache-2.0
"""Bad input to the scripts: one clear line, status 2, and nothing compiled or written."""

import json
import subprocess
import sys

import inputs
import jax
import numpy as np
import pytest
import run_eval
import run_gppo
import run_sft
import session
from configs import GppoRun, SftRun

from klear_jax.model.config import QWEN3
from klear_jax.rl.surrogates import Clip
from klear_jax.train.checkpoint import Checkpoints, model_record
from klear_jax.train.state import TrainState

RUN = {"gppo": run_gppo.run_gppo, "sft": run_sft.run_sft, "eval": run_eval.run_eval}
GOOD = {"question": "What is 1+1?", "answer": "2"}
LONG = {"question": "x" * 300, "answer": "1"}
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def write(name, *records):
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    with open(name, "w", encoding="utf-8") as file:
        file.write(text)


def script(monkeypatch, capsys, name, *flags):
    """Status, stdout and stderr of a script, run in this process."""
    monkeypatch.setattr(sys, "argv", [f"run_{name}.py", *flags])
    with pytest.raises(SystemExit) as caught:
        session.main(RUN[name])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


@pytest.fixture
def refused(monkeypatch, capsys, work, compiled):
    """Checks that a command is refused as it should be; returns stdout."""

    def check(name, *flags, **texts):
        before = sorted(p for p in work.rglob("*") if p.name != session.LOCK)
        status, out, err = script(monkeypatch, capsys, name, *flags)
        assert status == 2, out + err
        assert "Traceback" not in err
        for text in texts["says"]:
            assert text in err
        if texts.get("line", True):
            assert err.startswith("error: ")
            assert err.count("\n") == 1
        assert compiled == []
        assert sorted(p for p in work.rglob("*") if p.name != session.LOCK) == before
        return out

    return check


def test_a_compilation_would_be_noticed(compiled):
    jax.jit(lambda x: x + 41.5)(1.5)
    assert compiled


CASES = [
    ("gppo", ["nope"], ["no preset 'nope'", "demo, klear_8b_math"]),
    ("sft", ["nope"], ["no preset 'nope'", "demo, klear_8b_sft"]),
    ("eval", ["nope"], ["no preset 'nope'", "demo"]),
    ("gppo", ["--model=9b"], ["no model '9b'", "0.6b, 1.7b, 4b, 8b, 14b, 32b, tiny"]),
    ("sft", ["--model=9b"], ["no model '9b'", "32b, tiny"]),
    ("eval", ["--model=9b"], ["no model '9b'", "32b, tiny"]),
    ("gppo", ["--model=8b"], ["model 8b starts from weights: give --init=DIR"]),
    ("gppo", ["klear_8b_math"], ["give --init=DIR"]),
    ("gppo", ["klear_8b_math", "--init=x"], ["needs training problems: give --problems=FILE"]),
    ("sft", ["klear_8b_sft"], ["give --init=DIR"]),
    ("eval", ["--model=8b"], ["give --init=DIR"]),
    ("gppo", ["--tokenizer=gpt"], ["tokenizer 'gpt' is unknown", "'bytes', 'qwen3'"]),
    ("gppo", ["--tasks", "sum", "plus"], ["sum, sort, reverse"]),
    ("sft", ["--tasks", "plus"], ["sum, sort, reverse"]),
    ("eval", ["--tasks", "plus"], ["sum, sort, reverse"]),
    ("gppo", ["--eval-problems=99999"], ["heldout problems, 50000 were asked for"]),
    ("gppo", ["--mesh=fsdp:3"], ["mesh fsdp:3 needs 3 devices and there are 4", "fsdp:4"]),
    ("gppo", ["--mesh=fsdp"], ["cannot read 'fsdp'", "fsdp:8,tensor:4"]),
    ("gppo", ["--mesh=rows:4"], ["cannot read 'rows:4'", "data, fsdp, seq, tensor"]),
    ("gppo", ["--mesh=tensor:4"], ["kv_heads (size 2)", "4 pieces", "[1, 2]"]),
    ("sft", ["--mesh=tensor:4"], ["kv_heads (size 2)"]),
    ("eval", ["--mesh=tensor:4"], ["kv_heads (size 2)"]),
    ("gppo", ["--rollout-mesh=data:3"], ["mesh data:3 needs 3 devices and there are 4"]),
    ("gppo", ["--rollout-mesh=rows"], ["cannot read 'rows'"]),
    ("gppo", ["--mesh=fsdp:2", "--rollout-mesh=data:3"], ["needs 3 devices and there are 2"]),
    ("gppo", ["--rollout-mesh=tensor:4"], ["kv_heads (size 2)", "4 pieces"]),
    ("gppo", ["--slots=6"], ["into 4 pieces", "slots 6", "a multiple of 4"]),
    ("gppo", ["--cache-tokens=4160"], ["pages 130", "a multiple of 4"]),
    ("gppo", ["--cache-tokens=128"], ["cache_tokens 128", "each of 4", "raise it, or lower max"]),
    ("gppo", ["--narrowest=999"], ["narrowest 999 must lie in 1..128"]),
    ("eval", ["--slots=6"], ["slots 6", "a multiple of 4"]),
    ("eval", ["--cache-tokens=256"], ["cache_tokens 256", "raise it, or lower max"]),
    ("gppo", ["--microbatch-rows=6"], ["batch (size 6)", "4 pieces"]),
    ("sft", ["--microbatch-rows=6"], ["batch (size 6)", "4 pieces"]),
    ("gppo", ["--row-tokens=64", "--max-tokens=60"], ["row_tokens 64 is shorter", "max_tokens"]),
    ("gppo", ["--max-tokens=5000"], ["4096 positions", "lower max_tokens"]),
    ("eval", ["--max-tokens=5000"], ["4096 positions", "lower max_tokens"]),
    ("gppo", ["--max-prompt-tokens=26"], ["max_prompt_tokens 26 is too few for sum/sort"]),
    ("gppo", ["--problems=no.jsonl"], ["no.jsonl", "No such file"]),
    ("gppo", ["--heldout=no.jsonl"], ["no.jsonl", "No such file"]),
    ("sft", ["--data=no.jsonl"], ["no.jsonl", "No such file"]),
    ("eval", ["--problems", "no.jsonl"], ["no.jsonl", "No such file"]),
    ("gppo", ["--init=nowhere"], ["no folder nowhere"]),
    ("eval", ["--init=nowhere"], ["no folder nowhere"]),
    ("gppo", ["demo+nope"], ["no algorithm 'nope'; the algorithms are grpo, dapo"]),
    (
        "gppo",
        ["--overlap", "--lag=1", "--mesh=fsdp:4"],
        ["the mesh has 4 devices", "--lag alone"],
    ),
    ("gppo", ["--resume", "--out=nowhere"], ["nowhere holds no run to resume"]),
    ("sft", ["--resume", "--out=nowhere"], ["nowhere holds no run to resume"]),
]


@pytest.mark.parametrize(
    ("name", "flags", "says"), CASES, ids=lambda x: x if isinstance(x, str) else " ".join(x)
)
def test_flags(refused, name, flags, says):
    refused(name, *flags, says=says)


PANELS = [
    ("gppo", ["--rollout-dtype=int8"], ["invalid choice 'int8'", "bfloat16"]),
    ("gppo", ["--slots=0"], ["slots 0", "at least 1"]),
    ("gppo", ["--page=0"], ["page 0", "at least 1"]),
    ("gppo", ["--cache-tokens=16"], ["cache_tokens 16", "at least a page"]),
    ("gppo", ["--clip.variant=nope"], ["invalid choice 'nope'", "'gppo'", "'ppo'"]),
    (
        "gppo",
        ["--clip.high=0.2", "--clip.dual=1.1"],
        ["clip dual 1.1 must lie above the upper bound 1.2"],
    ),
    ("gppo", ["--clip.low=-1"], ["clip low -1.0 must lie in [0, 1]"]),
    ("gppo", ["--samples=1"], ["samples 1 leaves every group", "samples >= 2"]),
    ("gppo", ["--temperature=0"], ["a greedy policy has no ratio"]),
    (
        "gppo",
        ["--problems-per-step=32", "--updates=64"],
        ["64 updates need at least as many groups"],
    ),
    ("gppo", ["--objective.positive-nll=-1"], ["positive_nll -1.0: must be >= 0"]),
    ("gppo", ["--objective.kl-estimator=k1"], ["gradient of expectation 0", "use k2 or k3"]),
    ("gppo", ["--objective.kl-estimator=k2"], ["no effect while kl_coef is 0.0"]),
    ("gppo", ["--objective.tis-cap=3"], ["no effect while tis is none"]),
    ("gppo", ["--objective.erc", "1.1", "1.2"], ["two numbers around 1"]),
    ("gppo", ["--clip.beta-low=0.5"], ["beta_low 0.5 has no effect on variant gppo"]),
    ("gppo", ["--clip.variant=cispo", "--clip.dual=10"], ["dual 10.0 has no effect on"]),
    ("gppo", ["--clip.level=geometric"], ["goes with variant unclipped"]),
    ("gppo", ["--overlap"], ["overlap needs a lag of at least 1"]),
    ("gppo", ["--overlong.factor=2"], ["no effect without a buffer"]),
    ("gppo", ["--overlong.buffer=100"], ["longer than max_tokens 35"]),
    ("gppo", ["--minibatch-groups=5"], ["7 mini-batches, and updates is 4"]),
    ("gppo", ["--rounds=2", "--group-filter=none"], ["rounds 2 has no effect"]),
    ("gppo", ["--objective.aggregation=mean"], ["'token_mean'", "'sequence_mean'"]),
    ("gppo", ["--group-filter=all"], ["'reward'", "'accuracy'", "'none'"]),
    ("gppo", ["--training-reward=x"], ["'raw'", "'paper'", "'released'"]),
    ("gppo", ["--optim.clip-norm=0"], ["clip_norm 0.0"]),
    (
        "gppo",
        ["--optim.schedule=constant", "--optim.final-learning-rate=1"],
        ["no effect with the constant schedule"],
    ),
    ("gppo", ["--eval-top-p=2"], ["top_p 2.0 must lie in (0, 1]"]),
    ("gppo", ["--eval-temperature=-1"], ["eval_temperature -1.0 must be >= 0"]),
    ("gppo", ["--resume"], ["--resume needs --out"]),
    ("gppo", ["--steps=many"], ["--steps", "many"]),
    ("gppo", ["--nonsense=1"], ["--nonsense"]),
    ("gppo", ["--cpu-devices=0"], ["cpu_devices 0 must be at least 1"]),
    ("eval", ["--temperature=-1"], ["temperature -1.0 must be >= 0"]),
    ("eval", ["--samples=0"], ["samples 0"]),
    ("sft", ["--dtype=float16"], ["'float32'", "'bfloat16'"]),
    ("sft", ["--batch=0"], ["batch 0 must be at least 1"]),
]


@pytest.mark.parametrize(
    ("name", "flags", "says"), PANELS, ids=lambda x: x if isinstance(x, str) else " ".join(x)
)
def test_fields(refused, name, flags, says):
    """What the command-line reader refuses, in its own layout on stderr."""
    refused(name, *flags, says=says, line=False)


FILES = [
    ("{not json", "bad.jsonl:2: not JSON"),
    ("[1, 2]", "bad.jsonl:2: a list, not an object"),
    ({"question": "q"}, "bad.jsonl:2: answer: missing"),
    ({"question": "q", "answer": ""}, "bad.jsonl:2: answer: empty"),
    ({"answer": "1"}, "bad.jsonl:2: messages: missing"),
    ({"question": "", "answer": "1"}, "bad.jsonl:2: question[0].content"),
    ({"question": "q", "answer": "1", "id": "bad-1"}, "bad.jsonl:2: id: 'bad-1' is also on line 1"),
    (
        {"question": "q", "tests": [{"input": "1", "output": "2"}]},
        "1 problems (bad-2, ...) are code problems",
    ),
]


@pytest.mark.parametrize("use", ["--problems", "--heldout", "eval"])
@pytest.mark.parametrize(("second", "says"), FILES, ids=lambda x: str(x)[:30])
def test_a_bad_line_of_problems(refused, use, second, says):
    write("bad.jsonl", GOOD, second)
    flags = ("eval", "--problems") if use == "eval" else ("gppo", use)
    refused(*flags, "bad.jsonl", says=[says])


@pytest.mark.parametrize(
    "flags", [("gppo", "--problems"), ("gppo", "--heldout"), ("sft", "--data")]
)
def test_an_empty_file(refused, flags):
    write("empty.jsonl")
    refused(*flags, "empty.jsonl", says=["empty.jsonl: no problems; the file is empty"])


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (GOOD, "bad.jsonl:2: messages: missing"),
        ({"messages": TALK["messages"][:1]}, "bad.jsonl:2: messages: a demonstration must end"),
        ("oops", "bad.jsonl:2: not JSON"),
    ],
)
def test_a_bad_line_of_demonstrations(refused, second, says):
    write("bad.jsonl", TALK, second)
    refused("sft", "--data=bad.jsonl", says=[says])


def test_too_few_demonstrations(refused):
    write("few.jsonl", TALK, TALK)
    refused(
        "sft",
        "--data=few.jsonl",
        "--batch=64",
        says=["batch asks for 64 a step", "only 2 to choose from", "lower it"],
    )


def test_every_prompt_over_the_limit(refused):
    write("long.jsonl", LONG, LONG)
    flags = ["--max-prompt-tokens=99"]
    says = ["every prompt is longer than max_prompt_tokens 99 (the shortest has 319 tokens)"]
    refused("gppo", "--problems=long.jsonl", *flags, says=says)
    refused("gppo", "--heldout=long.jsonl", *flags, says=says)
    refused("eval", "--problems", "long.jsonl", *flags, says=says)


def test_some_prompts_over_the_limit_are_dropped_and_counted(refused):
    """Refused for the mesh of the batch, so that the run ends after the files were read."""
    write("some.jsonl", LONG, GOOD, LONG, GOOD)
    out = refused(
        "gppo", "--problems=some.jsonl", "--max-prompt-tokens=99", "--microbatch-rows=6",
        "--problems-per-step=32", "--oversample=1", "--updates=1",
        says=["batch (size 6)"],
    )  # fmt: skip
    assert "some.jsonl: dropped 2 of 4 problems: prompt over 99 tokens" in out
    assert "some.jsonl: 2 problems, so 2 a step, not 32" in out


def test_every_demonstration_over_the_limit(refused):
    write("long.jsonl", TALK)
    refused(
        "sft", "--data=long.jsonl", "--max-example-tokens=9",
        says=["long.jsonl: every example has over 9 tokens"],
    )  # fmt: skip


def test_two_files_of_one_name(refused, work):
    (work / "a").mkdir()
    write("p.jsonl", GOOD)
    write("a/p.jsonl", GOOD)
    refused("eval", "--problems", "p.jsonl", "a/p.jsonl", says=["have the same name; rename one"])


# --- folders of other runs --------------------------------------------------------------------


def run_folder(run, parameters=1):
    """A folder as a run leaves it before its first checkpoint."""
    return session.open_run(run, "x", parameters=parameters)


def checkpoint_in(folder, record):
    """A checkpoint with next to nothing in it: it is refused before a weight is read."""
    one = np.ones(2, np.float32)
    saves = Checkpoints(folder)
    saves.save(
        3, TrainState(params={"w": one}, opt_state={"m": one}, updates=one, skipped=one), record
    )
    saves.close()


@pytest.mark.parametrize("name", ["gppo", "sft", "eval"])
@pytest.mark.parametrize("where", ["gppo", "sft"])
def test_out_holds_a_run(refused, work, name, where):
    run_folder((GppoRun if where == "gppo" else SftRun)(out=work / "old"))
    refused(name, "--out=old", says=["old is not empty; give another --out, or --resume"])


def test_out_is_a_file(refused, work):
    (work / "old").write_text("mine")
    refused("gppo", "--out=old", says=["old is not empty"])
    assert (work / "old").read_text() == "mine"


def test_resume_of_an_empty_folder(refused, work):
    (work / "old").mkdir()
    refused("gppo", "--resume", "--out=old", says=["old holds no run to resume"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{torn", "is no JSON"),
        ("[1]", "is not the config of a run"),
        ('{"kind": "GppoRun"}', "is not the config of a run"),
        ('{"kind": "GppoRun", "config": {"steps": "x"}}', "$.steps"),
        ('{"kind": "GppoRun", "config": {"samples": 1}}', "samples 1 leaves every group"),
        ('{"kind": "SftRun", "config": {}}', "holds a SftRun, not a GppoRun"),
    ],
)
def test_resume_of_a_damaged_config(refused, work, text, says):
    (work / "old").mkdir()
    (work / "old" / "config.json").write_text(text)
    refused("gppo", "--resume", "--out=old", says=[says])


def test_resume_with_another_config(refused, work):
    run_folder(GppoRun(out=work / "old", samples=4, clip=Clip(low=0.2)))
    refused(
        "gppo", "--resume", "--out=old", "--samples=8", "--clip.low=0.1",
        says=["cannot be resumed with another config", "samples: the run has 4, the command 8",
              "clip: the run has", "only out, resume, steps"],
    )  # fmt: skip


def test_the_saved_config_is_the_default_of_a_resumed_run(work):
    run = GppoRun(out=work / "old", samples=4, problems=work / "p.jsonl", tasks=("sort",))
    run_folder(run)
    read = session.command_line(
        {"demo": GppoRun()}, ["--resume", f"--out={work / 'old'}", "--steps=7"]
    )
    expected = {**vars(run), "resume": True, "steps": 7}
    assert vars(read) == expected
    assert session.open_run(read, "x", parameters=1) == work / "old"


def test_resume_with_other_problems(refused, work):
    """The path is the same, what is in the file is not."""
    write("p.jsonl", GOOD, GOOD | {"question": "and 2+2?"})
    run_folder(GppoRun(out=work / "old", problems="p.jsonl"))
    record = {"kind": "gppo", "seed": 0, "model": model_record(QWEN3["tiny"]), "problems": "other"}
    checkpoint_in(work / "old", record)
    refused(
        "gppo", "--resume", "--out=old",
        says=["belongs to another run or model: problems: checkpoint 'other', here '"],
    )  # fmt: skip


def test_resume_with_other_demonstrations(refused, work):
    write("d.jsonl", *[TALK] * 64)
    run_folder(SftRun(out=work / "old", data="d.jsonl", batch=64))
    record = {"kind": "sft", "seed": 0, "model": model_record(QWEN3["tiny"]), "data": "other"}
    checkpoint_in(work / "old", record)
    refused("sft", "--resume", "--out=old", says=["data: checkpoint 'other', here '"])


@pytest.mark.parametrize("name", ["gppo", "sft", "eval"])
def test_weights_of_another_model(refused, work, name):
    other = model_record(QWEN3["tiny"]) | {"layers": 5, "d_model": 64}
    checkpoint_in(work / "sft", {"model": other})
    refused(
        name, "--init=sft", "--out=new",
        says=["sft is a checkpoint of another model", "d_model: checkpoint 64, here 96",
              "layers: checkpoint 5, here 3"],
    )  # fmt: skip


def test_weights_for_another_tokenizer(refused, work):
    checkpoint_in(work / "sft", {"model": model_record(QWEN3["tiny"])})
    refused(
        "gppo", "--init=sft", "--tokenizer=qwen3", "--max-tokens=20",
        says=["live_vocab: checkpoint 263, here 151669"],
    )  # fmt: skip


def test_a_run_without_a_checkpoint(refused, work):
    (work / "sft" / "checkpoints").mkdir(parents=True)
    refused("gppo", "--init=sft", says=["sft/checkpoints holds no complete checkpoint"])


# --- as processes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--cpu-devices=4", "--mesh=tensor:4"], "kv_heads (size 2) over tensor into 4 pieces"),
        (["--mesh=fsdp:2"], "mesh fsdp:2 needs 2 devices and there are 1"),
    ],
)
def test_a_mesh_as_a_process(finish, work, flags, says):
    status, out, err = finish("run_gppo.py", "--out=new", *flags, cwd=work)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1
    assert not list(work.iterdir())


def test_a_full_disk_shows_no_traceback(monkeypatch, capsys):
    def fill(argv):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(RUN, "gppo", fill)
    status, _, err = script(monkeypatch, capsys, "gppo")
    assert status == 1
    assert err == "error: [Errno 28] No space left on device; what was saved before is whole\n"


def test_help_explains_every_field():
    done = subprocess.run(
        [sys.executable, str(session.ROOT / "experiments" / "run_gppo.py"), "--help"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0
    for name in ("--problems-per-step", "--clip.dual", "--objective.positive-nll", "klear_8b_math"):
        assert name in done.stdout


def test_a_folder_in_use_is_refused(work):
    folder = work / "busy"
    folder.mkdir()
    refusal = pytest.raises(session.UsageError, match="another process is running in")
    with session.locked(folder), refusal, session.locked(folder):
        pass
    with session.locked(folder):
        pass


def test_an_answer_that_nothing_could_be_graded_against(refused):
    write("gold.jsonl", {"question": "1+1", "answer": "2"}, {"question": "x", "answer": "\\frac{"})
    refused("gppo", "--problems=gold.jsonl", says=["1 of 2 problems", "cannot be graded", "gold-2"])


def test_a_run_without_a_finite_update_is_no_success():
    class State:
        updates, skipped = 0, 3

    with pytest.raises(session.UsageError, match="all 3 updates were skipped"):
        inputs.check_learned(State)
