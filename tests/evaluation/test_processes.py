"""The same numbers from two processes as from one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import toys

from hf_kvcache.evaluation.processes import Team, own_device, team

PROGRAM = """
import json, sys
import torch
import toys
from hf_kvcache.evaluation import Grid, Prompts, Protocol, evaluate
from hf_kvcache.evaluation.processes import team
from hf_kvcache.evaluation.report import as_json

torch.set_num_threads(1)
with toys.few_problems():
    results = evaluate(
        toys.loaded(), [toys.TEXT], ["paged:block_size=16", "toys:rounded"],
        tasks=["fidelity", "exactness", "retrieval", "generation"], protocol=Protocol(60, 12, 8),
        max_tokens=235, grid=Grid((250,), (0.0, 1.0)), prompts=Prompts(2, 16, 8), progress=False,
    )
rank = team(torch.device("cpu")).rank
record = {name: of for name, of in as_json(results).items() if name not in ("seconds", "environment")}
with open(f"{sys.argv[1]}-{rank}.json", "w") as file:
    json.dump(record | {"kl": results.caches[1].samples.kl.tolist()}, file)
"""


def run(folder, name, *launcher):
    program = folder / "program.py"
    program.write_text(PROGRAM)
    paths = os.pathsep.join([str(Path(toys.__file__).parent), str(Path(__file__).parents[2])])
    surroundings = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(program), str(folder / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-*.json"))]


# On machines without GPUs, what `accelerate launch --multi_gpu` starts are processes on the CPU.
LAUNCHER = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
LAUNCHER += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


def test_two_processes_give_the_numbers_of_one(tmp_path):
    (alone,) = run(tmp_path, "alone")
    first, second = run(tmp_path, "both", *LAUNCHER)
    assert first == second == alone
    assert alone["windows"] == 5


def test_pieces_are_shared_in_turns_and_joined_in_order():
    assert [[Team(rank, 3).owns(number) for number in range(4)] for rank in range(3)] == [
        [True, False, False, True],
        [False, True, False, False],
        [False, False, True, False],
    ]
    assert Team().share({2: "c", 0: "a", 1: "b"}) == ["a", "b", "c"]
    assert Team().by_first(lambda: 5) == 5
    assert Team().first


def test_a_program_started_as_usual_is_alone(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert team(torch.device("cpu")) == Team(0, 1)
    assert own_device("cuda") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device("cuda") == "cuda:1"
    assert own_device("cpu") == "cpu"
