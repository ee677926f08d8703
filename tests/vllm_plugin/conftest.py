# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Engines, each in a process and run once a session; tiny checkpoints; and `sievemla run` as the reference."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"

# vLLM's threads and ours share the cores of a test machine: none of them may spin.
QUIET = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}

TOKENS = 12
EXACT = {"SIEVEMLA_INDEX_FORMAT": "f32"}  # indexer keys unquantised: nothing but rounding differs
ENGINE = [sys.executable, str(HERE / "engine.py")]


class Done(NamedTuple):
    status: int
    log: str
    out: Path


class Engines:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.models: dict[str, Path] = {}
        self.forks: subprocess.Popen | None = None

    def close(self) -> None:
        if self.forks:
            self.forks.stdin.close()
            self.forks.wait()

    def run(self, name: str, llm: dict, runs: list[dict], alone: bool, env: dict[str, str]) -> Done:
        """alone: in a process that imports vLLM anew, for what is decided then, and for engines with workers."""
        job, log, out = (self.directory / f"{name}.{end}" for end in ("job.json", "log", "json"))
        job.write_text(json.dumps({"llm": {"max_model_len": 512, "dtype": "float32", **llm}, "runs": runs}))
        if alone:
            with log.open("w") as file:
                status = subprocess.run([*ENGINE, job, out], stdout=file, stderr=file, timeout=600,
                                        env={**os.environ, **QUIET, **env}).returncode
        else:
            if not self.forks:
                self.forks = subprocess.Popen([*ENGINE, "--fork"], text=True, stdin=subprocess.PIPE,
                                              stdout=subprocess.PIPE, env={**os.environ, **QUIET})
            print(json.dumps({"job": str(job), "out": str(out), "log": str(log), "env": env}), file=self.forks.stdin,
                  flush=True)
            status = int(self.forks.stdout.readline())
        return Done(status, log.read_text(), out)

    def model(self, name: str) -> str:
        """The checkpoint alone: vLLM takes every safetensors file of a directory for weights."""
        if name not in self.models:
            directory = self.directory / name
            directory.mkdir()
            for file in ("config.json", "model.safetensors"):
                (directory / file).symlink_to(GOLDEN / name / file)
            self.models[name] = directory
        return str(self.models[name])

    def dense(self, name: str) -> str:
        """The same weights as a model without an indexer, which vLLM serves by its own dense MLA."""
        directory = self.directory / f"{name}-dense"
        if not directory.exists():
            from safetensors.torch import load_file, save_file

            directory.mkdir()
            config = json.loads((GOLDEN / name / "config.json").read_text())
            config = {key: value for key, value in config.items() if "index" not in key}
            config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
            (directory / "config.json").write_text(json.dumps(config))
            weights = load_file(GOLDEN / name / "model.safetensors")
            kept = {key: value for key, value in weights.items() if ".indexer." not in key}
            save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
        return str(directory)

    def with_draft_layer(self, name: str) -> str:
        """The checkpoint with a draft layer (MTP) behind it: its last layer once more, and a random projection."""
        directory = self.directory / f"{name}-draft"
        if not directory.exists():
            import torch
            from safetensors.torch import load_file, save_file

            directory.mkdir()
            config = json.loads((GOLDEN / name / "config.json").read_text())
            layers, hidden = config["num_hidden_layers"], config["hidden_size"]
            (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
            weights = load_file(GOLDEN / name / "model.safetensors")
            last, draft = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
            weights |= {key.replace(last, draft): value.clone() for key, value in weights.items() if last in key}
            projection = 0.2 * torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(1))
            weights |= {
                f"{draft}eh_proj.weight": projection.bfloat16(),
                f"{draft}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
                f"{draft}shared_head.head.weight": weights["lm_head.weight"].clone(),
            }
            weights |= {f"{draft}{norm}.weight": torch.ones(hidden, dtype=torch.bfloat16)
                        for norm in ("enorm", "hnorm", "shared_head.norm")}
            save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return str(directory)

    def __call__(self, name: str, llm: dict, runs: list[dict], *, alone: bool = False, **env: str) -> dict:
        done = self.run(name, llm, runs, alone, env)
        assert done.status == 0, done.log[-6000:]
        return {**json.loads(done.out.read_text()), "log": done.log}

    def refused(self, name: str, llm: dict, *, alone: bool = False, **env: str) -> str:
        done = self.run(name, llm, [], alone, env)
        assert done.status != 0, done.log[-3000:]
        return done.log


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


def reference(name: str, prompt: list[int], tokens: int, *options: str) -> dict:
    """`sievemla run` in double precision, with the eps that engines use."""
    done = subprocess.run(
        [sys.executable, "-m", "sievemla", "run", str(GOLDEN / name), "--prompt-ids", ",".join(map(str, prompt)), "-n",
         str(tokens), "--ignore-eos", "--backend", "reference", "--norm-eps", "config", "--json", *options],
        check=True, text=True, stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout)


def golden(name: str) -> dict:
    from safetensors.torch import load_file

    return load_file(GOLDEN / name / "golden.safetensors")


def prompts(name: str) -> list[list[int]]:
    """Of different lengths, on both sides of index_topk (40 to 48) and of a page."""
    text = golden(name)["prompt_ids"].tolist()
    return [text, text[:9], text[20:100], text[5:70]]


@pytest.fixture(scope="session")
def fresh(engines: Engines) -> dict[str, dict]:
    """Each model's prompts in one batch, whole prefill, nothing cached."""
    return {
        name: engines(
            name, {"model": engines.model(name), "enable_prefix_caching": False, "hf_overrides": overrides},
            [{"prompts": prompts(name), "tokens": TOKENS}], **EXACT,
        )
        for name, overrides in {
            "glm5-tiny": {},
            "dsv32-tiny": {},
            "glm52-tiny": {"index_topk_pattern": "FFSS"},  # vLLM does not read indexer_types
        }.items()
    }


@pytest.fixture(scope="session")
def unselective(engines: Engines) -> dict[str, dict]:
    """The same where index_topk is above every context."""
    return {
        name: engines(f"{name}-all", {"model": engines.model(name), "hf_overrides": {"index_topk": 512}},
                      [{"prompts": prompts(name), "tokens": TOKENS}])
        for name in ("glm5-tiny", "dsv32-tiny")
    }
