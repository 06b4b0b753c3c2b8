"""Write a model with random weights of a given size: speed depends on shapes alone, so no training is needed.

The default is the class that the bars of speed are set for: delta profile, 12 layers of width 768, a
vocabulary of 49,152, int8. The last line printed is a JSON object.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click
import numpy as np
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from fednl_runtime.config import HopeConfig
from fednl_runtime.export.graph import export_model
from fednl_runtime.export.quantize import quantize_file
from fednl_runtime.hope import Hope, parameters
from fednl_runtime.state import Array, state_bytes
from fednl_runtime.tokenizer import END_OF_TEXT


def byte_tokenizer() -> str:
    """A tokenizer of the 256 bytes and the special token; other ids of a vocabulary stand for nothing."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer.to_str()


def large_config(layers: tuple[str, ...] = ("delta",) * 12, top_rank: int = 64) -> HopeConfig:
    """The class of 100 to 200 MB: about 125 million parameters, one in a byte or in half of one."""
    return HopeConfig(
        vocab_size=49152,
        d_model=768,
        n_head=12,
        layers=layers,
        d_cms=2048,
        cms_periods=(512,),
        cms_rank=32,
        top_rank=top_rank,
    )


def random_parameters(config: HopeConfig, seed: int) -> dict[str, Array]:
    """Weights as training begins with; those that begin as zeros are drawn too, and all are exactly float16."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    params: dict[str, Array] = {}
    for name, value in parameters(Hope(config)).items():
        drawn = value if value.any() else 0.02 * rng.standard_normal(value.shape)
        params[name] = drawn.astype(np.float16).astype(np.float32)
    return params


def write_model(config: HopeConfig, path: Path, bits: int = 16, seed: int = 0) -> None:
    """Write a model file of float16, int8 or int4 weights."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wide = path if bits == 16 else Path(folder) / "wide.onnx"
        export_model(random_parameters(config, seed), config, byte_tokenizer(), wide, name="random")
        if bits != 16:
            quantize_file(wide, path, bits)


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--layers", default="delta", show_default=True, help="Profiles of the blocks, separated by commas.")
@click.option("--repeat", default=12, show_default=True, help="How often these blocks follow each other.")
@click.option("--top-rank", default=64, show_default=True, help="Rank of the top level; 0 leaves it out.")
@click.option("--bits", type=click.Choice([16, 8, 4]), default=8, show_default=True, help="Bits of a weight.")
@click.option("--seed", default=0, show_default=True)
def main(output: Path, layers: str, repeat: int, top_rank: int, bits: int, seed: int) -> None:
    """Write OUTPUT, a model file of the 100 to 200 MB class."""
    config = large_config(tuple(layers.split(",")) * repeat, top_rank)
    write_model(config, output, bits, seed)
    click.echo(json.dumps({"file_bytes": output.stat().st_size, "state_bytes": state_bytes(config), "bits": bits}))


if __name__ == "__main__":
    main()
