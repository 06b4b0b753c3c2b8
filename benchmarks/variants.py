"""The arms of the ablations: what each takes away from a Hope or adds to it."""

from __future__ import annotations

import dataclasses

import torch
from baselines import Transformer, TransformerWithTop
from descent import Descent
from taught import Taught
from torch import Tensor

from fednl_runtime import recurrence as rec
from fednl_runtime.config import MEMORIES, HopeConfig
from fednl_runtime.hope import Cuts, Hope
from fednl_runtime.recurrence import TensorDict, unit

LETTERS = {"d": "delta", "s": "self_modifying"}
SMALL = HopeConfig(4096, d_model=96, n_head=2, cms_periods=(64, 512, 4096), d_cms=96)
"""The reduced size of the design that the ablations began with: three CMS levels."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One arm: its configuration, its class, and the position at which a fresh session begins."""

    config: HopeConfig
    model: type[Hope] = Hope
    start: int = 256


def layers(letters: str) -> HopeConfig:
    """The reduced model with a mix of layers, one letter a block."""
    return dataclasses.replace(SMALL, layers=tuple(LETTERS[letter] for letter in letters))


class OneTimeScale(Hope):
    """All heads begin with the same retention, the geometric mean of those of Hope."""

    def __init__(self, config: HopeConfig, compute: torch.dtype | None = None) -> None:
        super().__init__(config, compute)
        for block in self.layers:
            bias = block.b_alpha.data
            retention = torch.sigmoid(bias.double()).log().abs().log().mean().exp().neg().exp()
            bias.fill_(float(torch.logit(retention)))


class EagerCms(Hope):
    """CMS levels begin with larger steps and slower forgetting, so that learning outweighs decay."""

    def __init__(self, config: HopeConfig, compute: torch.dtype | None = None) -> None:
        super().__init__(config, compute)
        for block in self.layers:
            block.cms_step.data.fill_(2.0)
            block.cms_decay.data.fill_(6.0)


class NormalisedSteps(Hope):
    """A CMS level's step is divided by |G|, not by its period: as large as is stable whatever the keys."""

    def cms(
        self, x: Tensor, layer: TensorDict, state: TensorDict, cuts: list[Cuts], adapt: Tensor
    ) -> tuple[Tensor, TensorDict]:
        """As in Hope, with F <- lambda F + eps (A - G F) / |G|."""
        c = self.config
        new: dict[str, list[Tensor]] = {"cms_f": [], "cms_a": [], "cms_g": []}
        steps, decays = torch.sigmoid(layer["cms_step"]), torch.sigmoid(layer["cms_decay"])
        for i in range(c.n_cms):
            h = self.linear(self.rms_norm(x, layer["cms_norm"][i]), layer["cms_in"][i])
            up, p, t = h.split([c.d_cms, c.cms_rank, c.d_model], -1)
            p = unit(p, c.norm_eps)
            f, a, g = state["cms_f"][:, i], state["cms_a"][:, i], state["cms_g"][:, i]
            reads = []
            for start, stop, closing in cuts[i]:
                scale = torch.rsqrt(g.square().sum((1, 2), keepdim=True) + 1)
                f, a, g = rec.cms_close(f, a, g, steps[i] * scale, decays[i], adapt, closing)
                keys = p[:, start:stop]
                reads.append(keys @ f)
                weighted = (adapt[:, 1, None, None] * keys).transpose(1, 2)
                a, g = a + weighted @ t[:, start:stop], g + weighted @ keys
            x = x + self.linear(torch.nn.functional.silu(up), layer["cms_out"][i]) + torch.cat(reads, 1)
            for name, value in zip(new, (f, a, g), strict=True):
                new[name].append(value)
        return x, {name: torch.stack(values, 1) for name, values in new.items()}


def silent(*levels: int) -> type[Hope]:
    """Hope whose CMS levels of those numbers never learn in a session: static MLPs."""

    class Silent(Hope):
        def cms(
            self, x: Tensor, layer: TensorDict, state: TensorDict, cuts: list[Cuts], adapt: Tensor
        ) -> tuple[Tensor, TensorDict]:
            """As in Hope, the steps of the silent levels being zero."""
            off = torch.tensor([i in levels for i in range(self.config.n_cms)])
            steps = layer["cms_step"].masked_fill(off, float("-inf"))
            return super().cms(x, layer | {"cms_step": steps}, state, cuts, adapt)

    return Silent


def static(memory: str) -> type[Hope]:
    """Hope whose self-modifying layers keep one memory at its learned initial weights."""
    learns = torch.tensor([name != memory for name in MEMORIES]).float()

    class Static(Hope):
        def __init__(self, config: HopeConfig, compute: torch.dtype | None = None) -> None:
            super().__init__(config, compute)
            mask = learns.repeat_interleave(config.n_head)[:, None, None]

            def memories(*arguments: object) -> tuple[Tensor, TensorDict]:
                y, state = rec.self_modifying(*arguments)  # type: ignore[arg-type]
                return y, {name: tensor * mask for name, tensor in state.items()}

            self.self_modifying = memories

    return Static


def variants() -> dict[str, Variant]:
    """All arms by name; `ddsd` is the first shipped design, the others differ from it in what their name says."""
    base = layers("ddsd")
    mixes = ("ddsd", "dddd", "ssss", "sdsd", "dsdd", "ddds")
    return {
        **{name: Variant(layers(name)) for name in mixes},
        "transformer": Variant(base, Transformer, start=0),
        "transformer_top": Variant(base, TransformerWithTop, start=0),
        "aligned": Variant(base, start=0),
        "without_top": Variant(dataclasses.replace(base, top_rank=0)),
        "static_cms": Variant(base, silent(0, 1, 2)),
        "without_cms_64": Variant(base, silent(0)),
        "without_cms_512": Variant(base, silent(1)),
        "without_cms_4096": Variant(base, silent(2)),
        "one_cms_level": Variant(dataclasses.replace(base, cms_periods=(512,), d_cms=288)),
        "dddd_one_cms_level": Variant(dataclasses.replace(layers("dddd"), cms_periods=(512,), d_cms=288)),
        "taught_cms": Variant(base, Taught),
        "dddd_taught_cms": Variant(layers("dddd"), Taught),
        "dddd_static_cms": Variant(layers("dddd"), silent(0, 1, 2)),
        "eager_cms": Variant(base, EagerCms),
        "normalised_cms": Variant(base, NormalisedSteps),
        **{f"chunk_{n}": Variant(dataclasses.replace(base, memory_period=n)) for n in (16, 32, 128)},
        "without_decay": Variant(dataclasses.replace(base, log_alpha_min=0.0)),
        "one_time_scale": Variant(base, OneTimeScale),
        "without_dgd": Variant(layers("ssss"), Descent),
        **{f"static_{name}": Variant(layers("ssss"), static(name)) for name in MEMORIES[:-1]},
    }
