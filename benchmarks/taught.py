"""Hope whose CMS levels learn from the top level's exact gradient in place of their local target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fednl_runtime import recurrence as rec
from fednl_runtime.hope import Cuts, Hope
from fednl_runtime.recurrence import TensorDict, unit

PIECE = 64
"""Tokens between the moments at which the gradients reach the levels: the fastest period."""


class Taught(Hope):
    """The residual stream counts as an identity: the gradient at h' is that of every level's output.

    F <- lambda F - (eps / C) sum_t p_t g_t^T, scaled as the top level's step is for its 16 tokens. The rows of
    `cms_in` that make local targets are idle.
    """

    def cms(
        self, x: Tensor, layer: TensorDict, state: TensorDict, cuts: list[Cuts], adapt: Tensor
    ) -> tuple[Tensor, TensorDict]:
        """As in Hope, but A waits for the gradients; the keys `[B, k, T, r]` are handed on as `cms_p`."""
        c = self.config
        steps, decays = torch.sigmoid(layer["cms_step"]), torch.sigmoid(layer["cms_decay"])
        memories, keys = [], []
        for i, period in enumerate(c.cms_periods):
            h = self.linear(self.rms_norm(x, layer["cms_norm"][i]), layer["cms_in"][i])
            p = unit(h[..., c.d_cms : c.d_cms + c.cms_rank], c.norm_eps)
            (_, _, closing), *_ = cuts[i]
            f, a, g = (state[name][:, i] for name in ("cms_f", "cms_a", "cms_g"))
            memories.append(rec.cms_close(f, a, g, steps[i] / period, decays[i], adapt, closing))
            keys.append(p)
            x = x + self.linear(F.silu(h[..., : c.d_cms]), layer["cms_out"][i]) + p @ memories[-1][0]
        new = {
            n: torch.stack(t, 1) for n, t in zip(("cms_f", "cms_a", "cms_g"), zip(*memories, strict=True), strict=True)
        }
        return x, new | {"cms_p": torch.stack(keys, 1)}

    def loss(self, tokens: Tensor, targets: Tensor, state: TensorDict) -> tuple[Tensor, TensorDict]:
        """As in Hope, in pieces of 64 tokens, after each of which the gradients are added to A."""
        losses = []
        scale = 2 * self.config.top_period * self.config.vocab_size / self.embedding.detach().square().sum()
        for start in range(0, tokens.shape[1], PIECE):
            piece = slice(start, start + PIECE)
            nats, g, state = self.taught_piece(tokens[:, piece], targets[:, piece], state)
            losses.append(nats)
            for i in range(self.config.n_layer):
                keys = state.pop(f"{i}.cms_p")
                state[f"{i}.cms_a"] = state[f"{i}.cms_a"] - scale * keys.transpose(-1, -2) @ g[:, None]
        return torch.cat(losses, 1), state

    def taught_piece(self, tokens: Tensor, targets: Tensor, state: TensorDict) -> tuple[Tensor, Tensor, TensorDict]:
        """Loss `[B, n]` and gradient at h' `[B, n, d]` of one piece, and the next state."""
        c = self.config
        adapt = self.adapt(len(tokens))
        h, new = self.body(tokens, state, adapt)
        new |= {"position": state["position"] + tokens.shape[1]}
        embedding = self.embedding if self.compute is None else self.embedding.to(self.compute)
        p, rates = unit(h @ self.top.p.T, c.norm_eps), self.top_rates()
        everyone = torch.ones(len(tokens), dtype=torch.bool)
        f = self.top_close(state, tokens[:, 0], adapt, everyone)
        reads, errors = [], []
        for start in range(0, tokens.shape[1], c.top_period):
            piece = slice(start, start + c.top_period)
            reads.append(h[:, piece] + p[:, piece] @ f)
            errors.append(self.next_token(reads[-1], embedding, targets[:, piece]))
            new |= {"top.f": f} | self.pending(reads[-1], p[:, piece], tokens[:, piece], adapt)
            f = rec.top_step(f, p[:, piece].transpose(1, 2) @ errors[-1][1], *rates, adapt, everyone)
        nats, g, error = (torch.cat(parts, 1) for parts in zip(*errors, strict=True))
        return rec.CrossEntropy.apply(torch.cat(reads, 1), embedding, nats, g, error), g, new
