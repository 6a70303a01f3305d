"""How many bytes a target's forward pass and a drafter's training step take, line by line.

Sizes follow from configurations: what one layer of the target holds at its widest place, and what
autograd keeps of the drafter until the backward pass. Each line names the tensors it counts, in the
order in which the model code makes them, so that a change there can be followed here.

Letters: e bytes per element, H hidden size, F MLP width, A = heads · head_dim, K = kv_heads ·
head_dim, V vocabulary, T slots of the packed row, N anchors, B block size, Q = N · B block slots,
P drafter parameters.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs

from engine.dflash.attention import BLOCKS_PER_PIECE
from engine.dflash.configuration import DrafterConfig
from engine.dflash.masters import PIECE

if TYPE_CHECKING:
    import torch

    from engine.target.loading import Target

DELTA_RULE_CHUNK = 64
"""Tokens between two recurrent states that the chunked gated delta rule keeps."""


@attrs.frozen
class Item:
    """One thing that takes memory on a device at its peak."""

    what: str
    bytes: int
    keys: tuple[str, ...] = ()
    """What makes it smaller: keys of `memory_plan.ADVICE`."""


@attrs.frozen(kw_only=True)
class TargetMemory:
    """What the target takes on one device, in bytes; plugins that wrap the target say what they change."""

    loaded: int
    """Its weights while it is loaded, once for all lanes of the device."""
    weights: int
    """Its weights afterwards, likewise."""
    forward: int
    """Live at once in the widest place of a layer, per lane."""
    recorded: int = 0
    """Set aside for recordings of its forward, per lane."""


WrapTargetMemory = Callable[[TargetMemory, "Target", "torch.device"], TargetMemory]
"""What the target takes as loaded, the target without its numbers, a device → what it takes as it is used."""


def target_forward_bytes(text: Mapping[str, object], tokens: int, e: int, *, fused: bool) -> int:
    """Bytes that live at once in the widest place of one target layer, its input included.

    Args:
        text: the text part of a target's `config.json`.
        tokens: padded tokens of the micro-batch, rows · length.
        e: bytes per element of the states.
        fused: whether the gated delta rule runs as GPU kernels rather than plain float32 PyTorch.
    """

    def size(key: str, default: int = 0) -> int:
        value = text.get(key)
        return value if isinstance(value, int) else default

    H = size("hidden_size", size("n_embd"))
    experts = size("num_experts_per_tok") * size("moe_intermediate_size")
    F = max(size("intermediate_size", 4 * H), experts + size("shared_expert_intermediate_size"))
    heads = size("num_attention_heads", size("n_head", 1))
    d = size("head_dim", H // heads)
    A, K = heads * d, size("num_key_value_heads", heads) * d
    # The layer's input, which the caller holds, the sum after the mixer, and its norm.
    stream = 3 * H * e
    norm = 2 * H * e + 3 * H * 4  # in float32: the input, its square or product, the result
    mlp = stream + 3 * F * e  # act(gate), up, their product
    # q with its gate (2A), the gate's copy, normed and rotated q, k, v and their copies, output.
    attention = stream + (6 * A + 4 * K) * e
    per_token = [norm, mlp, attention]
    if "linear_num_value_heads" in text:
        heads_v = size("linear_num_value_heads")
        d_k, d_v = size("linear_key_head_dim"), size("linear_value_head_dim")
        k, v, w = size("linear_num_key_heads") * d_k, heads_v * d_v, heads_v * d_k
        mixed = 2 * k + v  # q, k and v, side by side
        states = heads_v * d_k * d_v // DELTA_RULE_CHUNK  # the recurrent state once per chunk
        pairs = heads_v * DELTA_RULE_CHUNK  # the chunk's lower triangle
        if fused:
            # Convolved and made contiguous, z, normed q and k, the WY form w and u, new values, output.
            delta = 2 * H * e + (2 * mixed + v + 2 * k + w + v + pairs + states + v + v) * e
        else:
            # float32: q, k and their scaled, decayed forms (w each), v likewise, four triangles.
            delta = 2 * H * e + (mixed + v) * e + (7 * w + 4 * v + 4 * pairs) * 4
        gated_norm = 2 * H * e + (mixed + 2 * v) * e + 3 * v * 4
        per_token += [delta, gated_norm]
    return tokens * max(per_token)


@attrs.frozen(kw_only=True)
class DrafterLane:
    """The memory of one drafter lane, in bytes."""

    config: DrafterConfig
    e: int
    """Bytes per element of weights and activations."""
    context: int
    """T, slots of the packed row."""
    longest: int
    """Tokens of the longest row."""
    anchors: int
    """N, blocks of a micro-batch."""
    chunk: int
    """Slots whose logits exist at a time."""
    state: int
    """Bytes of the optimizer's state for all masters."""
    lanes: int
    """Drafter lanes of the whole run, over which masters and that state are shared out."""
    turns: int
    """Micro-batches of one step that this lane trains on."""
    noise: bool
    checkpointing: bool
    """Whether only a layer's input is kept, and the layer is run again in the backward pass."""
    wide: bool
    """Whether gradient sums are float32; else they are the gradients themselves."""
    split_fc: bool
    flex: bool
    fused_norm: bool
    """Whether RMSNorm is one kernel, which keeps its input alone for the backward pass."""

    @property
    def parameters(self) -> int:
        """P: `fc`, per layer q, k, v, o, gate, up, down and four norms, and two norms around them."""
        c = self.config
        A, K = c.heads * c.head_dim, c.kv_heads * c.head_dim
        H, F = c.hidden_size, c.intermediate_size
        layer = H * (2 * A + 2 * K) + 3 * H * F + 2 * H + 2 * c.head_dim
        return len(c.target_layer_ids) * H * H + c.layers * layer + 2 * H

    @property
    def own(self) -> bool:
        """A float32 drafter is its own master; a step's first gradients become its sums."""
        return self.e == 4

    @property
    def weights(self) -> int:
        return self.parameters * self.e

    @property
    def masters(self) -> int:
        """This lane's share; the border between two shares may move it by one parameter."""
        return 0 if self.own else self.parameters * 4 // self.lanes

    @property
    def moments(self) -> int:
        """This lane's share of the optimizer's state."""
        return self.state // self.lanes

    def block_activations(self, layers: int | None = None) -> int:
        """What autograd keeps of the blocks' Q rows until the backward pass.

        Args:
            layers: of how many everything is kept, and of the others their inputs; all by default.
        """
        c, e = self.config, self.e
        H, F = c.hidden_size, c.intermediate_size
        A, K = c.heads * c.head_dim, c.kv_heads * c.head_dim
        Q = self.anchors * c.block_size
        norm = self._norm
        row = H * norm + H * e  # input_layernorm: its input; its output, read by q, k and v
        row += A * norm + K * norm  # q_norm and k_norm: their inputs; rotation keeps sines alone
        row += 2 * A * e + c.heads * 4  # rotated q, attention's output, log-sum-exp
        row += 2 * K * e  # the blocks' part of the joined k and v
        row += H * norm + H * e  # post_attention_layernorm: its input; its output, read by gate and up
        row += 4 * F * e  # gate, silu(gate), up, their product
        if not self.flex:
            piece = min(BLOCKS_PER_PIECE, self.anchors)
            row += A * e  # the pieces' outputs, beside the joined one
            row += (self.longest + piece * c.block_size) * e  # a query's row of the mask, as a bias
        layers = c.layers if layers is None else layers
        inputs = (c.layers - layers) * H * e
        return Q * (layers * row + inputs + H * norm + 2 * c.head_dim * 4)  # final norm; cosines and sines

    def context_activations(self, layers: int | None = None) -> int:
        """What autograd keeps of the context's T rows: taps, projection, norm, each layer's k and v.

        Args:
            layers: whose k and v; all by default.
        """
        c, e, T = self.config, self.e, self.context
        H, K = c.hidden_size, c.kv_heads * c.head_dim
        taps = len(c.target_layer_ids) * H * e * (2 if self.noise else 1)  # noise makes a copy
        once = taps + H * self._norm + H * e + 2 * c.head_dim * 4
        copies = 1 if self.flex else self._pieces_per_document  # each piece joins its document's k and v
        layers = c.layers if layers is None else layers
        return T * (once + layers * (K * self._norm + 2 * K * e * copies))

    def phases(self, to_bfloat16: tuple[str, ...] = ()) -> list[list[Item]]:
        """What the lane adds to weights, masters and moments: at the last logits, where the backward
        pass begins, where it ends, and in the optimizer. A lane peaks in one of them."""
        c, e, P = self.config, self.e, self.parameters
        H, F = c.hidden_size, c.intermediate_size
        Q = self.anchors * c.block_size
        # Checkpointed, all layers keep their inputs, and one at a time the rest, in the backward pass.
        all_at_once = c.layers if not self.checkpointing else 0
        one_more = max(all_at_once, 1)
        narrower = () if self.own else ("train.gradient_dtype",)
        sums = [Item("gradient sums (float32)", 4 * P, narrower)]
        if not self.wide:
            sums = [Item("gradient sums", e * P)]
        # In the lane's first turn of a step there are none yet.
        earlier = sums if self.turns > 1 else []
        cures = () if self.checkpointing else ("train.checkpointing",)

        def kept(layers: int) -> list[Item]:
            blocks, context = self.block_activations(layers), self.context_activations(layers)
            return [
                Item("drafter activations, blocks", blocks, ("data.max_anchors", *cures, *to_bfloat16)),
                Item("drafter activations, context", context, ("data.token_budget", *to_bfloat16)),
            ]

        rows = self.anchors * (c.block_size - 1)
        # Logits and log-sum-exp's temporary; a chunk's are gone before the next one's are made.
        logits = 2 * min(self.chunk, rows) * c.vocab_size * 4
        loss = [
            *earlier,
            *kept(all_at_once),
            Item("hidden states at the head", 3 * Q * H * e, ("data.max_anchors",)),
            Item("vocabulary chunk (float32)", logits, ("train.loss_chunk",)),
        ]
        begin = [
            *earlier,
            *kept(one_more),
            Item("backward, last layer", Q * (2 * F + 3 * H) * e, ("data.max_anchors",)),
        ]
        fc = len(c.target_layer_ids) * H * H * e
        largest = max(fc // e, H * F)
        blocks, rest = kept(1)
        first = self.block_activations() // c.layers
        layer = [
            attrs.evolve(blocks, what="drafter activations, first layer", bytes=first),
            rest,
            # A slice's gradient is as large as the whole matrix until it is added.
            Item("projection's gradients of its parts", 2 * fc if self.split_fc else 0),
        ]
        if self.wide or not earlier:
            gradients = Item("drafter gradients", P * e)
        else:  # each is added to what is there as soon as it is made
            gradients = Item("the largest gradient", largest * e)
        end = [*earlier, gradients, *layer]
        exchanged = sums[0].bytes * (self.lanes - 1) // self.lanes
        share = 4 * P // self.lanes
        optimizer = [
            *sums,
            Item("the other drafters' sums of this share", exchanged),
            Item("float32 gradients of a piece", 0 if self.wide else min(share, 4 * max(PIECE, largest))),
        ]
        return [loss, begin, end, optimizer]

    @property
    def _norm(self) -> int:
        """Bytes per element that RMSNorm keeps: its input, or in float32 input and quotient."""
        return self.e if self.fused_norm else 8

    @property
    def _pieces_per_document(self) -> int:
        documents = max(1, self.context // self.longest)
        return math.ceil(math.ceil(self.anchors / documents) / BLOCKS_PER_PIECE)
