"""Bugs planted in published ports, a line each: whether the check catches them, and the line that it reports."""

import re
from dataclasses import dataclass, field

from jaxtrain.errors import UserError
from tests.foreign.edits import Edit, source_of
from tests.foreign.ports import PORTS

STEPS = 2


@dataclass(frozen=True)
class Bug:
    """A bug in a port.

    Attributes:
      name: What is wrong.
      port: Name of the port.
      edit: The changed line.
      use: The first line that computes with what was changed, where the changed one only defines a constant, a layer or
        the order of layers, or computes no longer: part of its text. Several texts are lines of one value.
    """

    name: str
    port: str
    edit: Edit
    use: tuple[str, ...] = ()


def bug(name: str, port: str, old: str, new: str, *use: str, after: str = "") -> Bug:
    return Bug(name, port, Edit(old, new, after), use)


BUGS = [
    bug(
        "eps",
        "gpt2",
        "layer_norm_epsilon,",
        "layer_norm_epsilon * 10,",
        "self.ln_1(hidden",
        after="class FlaxGPT2Block(",
    ),
    bug("erf GELU", "gpt2", "ACT2FN[self.config.activation_function]", 'ACT2FN["gelu"]', "self.act("),
    bug("positions from 1", "gpt2", 'wpe(position_ids.astype("i4"))', 'wpe(position_ids.astype("i4") + 1)'),
    bug(
        "no causal mask",
        "gpt2",
        "combine_masks(attention_mask, causal_mask)",
        "attention_mask",
        "attention_mask > 0,",
        "attention_bias = lax.select(",
        "attn_weights = dot_product",
    ),
    bug(
        "query and key exchanged",
        "gpt2",
        "query, key, value = jnp.split(",
        "key, query, value = jnp.split(",
        "attn_weights = dot_product_attention_weights(",
    ),
    bug(
        "heads merged in the wrong order",
        "gpt2",
        "hidden_states.reshape(hidden_states.shape[:2] + (self.embed_dim,))",
        "hidden_states.swapaxes(2, 3).reshape(hidden_states.shape[:2] + (self.embed_dim,))",
    ),
    bug(
        "no residual",
        "gpt2",
        "hidden_states = residual + feed_forward_hidden_states",
        "hidden_states = feed_forward_hidden_states",
        "hidden_states = self.ln_1(hidden_states)",
        after="class FlaxGPT2Block(",
    ),
    bug(
        "residual twice", "gpt2", "hidden_states = attn_output + residual", "hidden_states = attn_output + 2 * residual"
    ),
    bug(
        "layers in reverse",
        "gpt2",
        "for block in self.blocks:",
        "for block in self.blocks[::-1]:",
        "hidden_states = self.ln_1(hidden_states)",
        "y = lax.dot_general(inputs, kernel",
    ),
    bug(
        "tied embedding without its gradient",
        "gpt2",
        '["wte"]["embedding"].T',
        '["wte"]["embedding"].T; shared_kernel = lax.stop_gradient(shared_kernel)',
        "lm_logits = self.lm_head.apply(",
    ),
    bug(
        "scale twice",
        "gpt2",
        "query = self._split_heads(query)",
        "query = self._split_heads(query) * self.head_dim**-0.5",
    ),
    bug("no bias", "gpt2", "y = y + bias", "y = y + 0 * bias"),
    bug(
        "no final norm",
        "gpt2",
        "hidden_states = self.ln_f(hidden_states)",
        "hidden_states = hidden_states + 0 * self.ln_f(hidden_states)",
    ),
    bug(
        "rotary base",
        "llama",
        "10000 **",
        "1000 **",
        "return jnp.array(out",
        "sincos = self.sincos[position_ids]",
        "sin_pos, cos_pos = jnp.split",
    ),
    bug(
        "rotation the other way",
        "llama",
        "(-tensor[..., tensor.shape[-1] // 2 :], tensor",
        "(tensor[..., tensor.shape[-1] // 2 :], -tensor",
    ),
    bug(
        "interleaved frequencies",
        "llama",
        "emb = np.concatenate((freqs, freqs), axis=-1)",
        "emb = np.repeat(freqs, 2, axis=-1)",
        "return jnp.array(out",
        "sincos = self.sincos[position_ids]",
        "sin_pos, cos_pos = jnp.split",
    ),
    bug(
        "rotary positions from 1 for keys",
        "llama",
        "key = apply_rotary_pos_emb(key, sin_pos, cos_pos)",
        "key = apply_rotary_pos_emb(key, *jnp.split(self.sincos[position_ids + 1], 2, axis=-1))",
    ),
    bug("eps outside of the root", "llama", "jnp.sqrt(variance + self.epsilon)", "(jnp.sqrt(variance) + self.epsilon)"),
    bug(
        "gate and up exchanged",
        "llama",
        "self.act(self.gate_proj(hidden_states))",
        "self.gate_proj(hidden_states); up_proj_states = self.act(up_proj_states)",
    ),
    bug(
        "groups of heads interleaved",
        "llama",
        "jnp.repeat(key, self.num_key_value_groups, axis=2)",
        "jnp.tile(key, (1, 1, self.num_key_value_groups, 1))",
    ),
    bug("weight of norm plus 1", "llama", "self.weight * jnp.asarray", "(1 + self.weight) * jnp.asarray"),
    bug("norm over the wrong axis", "llama", "variance.mean(-1, keepdims=True)", "variance.mean(-2, keepdims=True)"),
    bug(
        "sine and cosine exchanged",
        "gptj",
        "sin_pos, cos_pos = sincos",
        "cos_pos, sin_pos = sincos",
        "return (tensor * cos_pos)",
        "cos_pos = cos_pos[",
        "sin_pos = sin_pos[",
    ),
    bug(
        "rotary halves",
        "gptj",
        "sin_pos[:, :, None, :].repeat(2, 3)",
        "jnp.concatenate([sin_pos[:, :, None, :]] * 2, 3)",
    ),
    bug(
        "sequential block",
        "gptj",
        "self.mlp(hidden_states, deterministic=deterministic)",
        "self.mlp(hidden_states + attn_output, deterministic=deterministic)",
    ),
    bug(
        "rotated part",
        "gptj",
        "k_rot = apply_rotary_pos_emb(k_rot, sincos)",
        "k_rot = k_rot",
        "key = jnp.concatenate([k_rot",
    ),
    bug(
        "buckets",
        "t5",
        "* (num_buckets - max_exact)",
        "* num_buckets",
        "relative_position_if_large",
        "relative_buckets += jnp.where(",
    ),
    bug(
        "bidirectional decoder",
        "t5",
        "bidirectional=(not self.causal)",
        "bidirectional=True",
        "relative_buckets += (relative_position > 0)",
        "relative_position = jnp.abs(",
        "relative_position_bucket = self._rel",
    ),
    bug(
        "attention scaled",
        "t5",
        "query_states *= jnp.sqrt(query_states.shape[-1])",
        "query_states *= 1",
        "attn_weights = dot_product_attention_weights(",
    ),
    bug("no eps", "t5", "jnp.sqrt(variance + self.eps)", "jnp.sqrt(variance)"),
    bug(
        "relative positions with the other sign",
        "t5",
        "memory_position - context_position",
        "context_position - memory_position",
    ),
    bug(
        "no scale before a tied head",
        "t5",
        "sequence_output * (self.model_dim**-0.5)",
        "sequence_output * 1.0",
        "shared_kernel}}, sequence_output",
        "lm_logits = self.lm_head.apply(",
    ),
    bug(
        "stop_gradient of the encoder",
        "t5",
        "self.k(key_value_states)",
        "self.k(jax.lax.stop_gradient(key_value_states))",
    ),
    bug(
        "class token last",
        "vit",
        "jnp.concatenate((cls_tokens, embeddings), axis=1)",
        "jnp.concatenate((embeddings, cls_tokens), axis=1)",
    ),
    bug("patches by columns", "vit", "jnp.reshape(embeddings, (batch", "jnp.reshape(embeddings.swapaxes(1, 2), (batch"),
    bug("mean pooling", "vit", "self.classifier(hidden_states[:, 0, :])", "self.classifier(hidden_states.mean(1))"),
    bug(
        "tanh GELU",
        "vit",
        "self.activation = ACT2FN[self.config.hidden_act]",
        'self.activation = ACT2FN["gelu_new"]',
        "hidden_states = self.activation(hidden_states)",
    ),
    bug(
        "dropout left on",
        "vit",
        "hidden_states = hidden_states + attention_output",
        "hidden_states = hidden_states * jax.random.bernoulli(jax.random.key(0), 0.9) + attention_output",
    ),
    bug(
        "norm after the residual",
        "bert",
        "self.LayerNorm(hidden_states + input_tensor)",
        "self.LayerNorm(hidden_states) + input_tensor",
    ),
    bug(
        "token types of ones",
        "bert",
        "token_type_ids = jnp.zeros_like(input_ids)",
        "token_type_ids = jnp.ones_like(input_ids)",
        "self.token_type_embeddings(",
        after="    @add_start_docstrings_to_model_forward(BERT_INPUTS",
    ),
    bug(
        "no activation in the head",
        "bert",
        "hidden_states = self.activation(hidden_states)",
        "hidden_states = hidden_states",
        "return self.LayerNorm(hidden_states)",
        after="class FlaxBertPredictionHeadTransform(",
    ),
    bug("no bias of the logits", "bert", "hidden_states += bias", "hidden_states += 0 * bias"),
    bug(
        "softmax over the wrong axis",
        "bert",
        'jnp.einsum("...hqk,...khd->...qhd", attn_weights',
        'jnp.einsum("...hkq,...khd->...qhd", attn_weights',
    ),
    bug(
        "embedding scale in bfloat16",
        "gemma",
        "input_embeds * (self.config.hidden_size**0.5)",
        "input_embeds * jnp.asarray(self.config.hidden_size**0.5, jnp.bfloat16).astype(jnp.float32)",
    ),
    bug("weight of norm without 1", "gemma", "(1 + self.weight)", "(self.weight)"),
    bug(
        "window off by one",
        "gpt_neo",
        "-config.window_size)",
        "-config.window_size - 1)",
        "causal_mask = self.causal_mask[",
        "self.causal_mask = self.causal_mask ^",
        "combine_masks(attention_mask",
    ),
    bug(
        "scaled attention",
        "gpt_neo",
        "self.q_proj(hidden_states) * jnp.sqrt(self.head_dim).astype(self.dtype)",
        "self.q_proj(hidden_states)",
        "attn_weights = dot_product_attention_weights(",
        "query = self.q_proj(hidden",
    ),
    bug("position offset", "opt", "positions + self.offset)", "positions + self.offset - 1)"),
    bug(
        "residual of the normalized input",
        "opt",
        "hidden_states = residual + hidden_states",
        "hidden_states = self.self_attn_layer_norm(residual) + hidden_states",
    ),
    bug(
        "no norm of the embedding",
        "bart",
        "hidden_states = self.layernorm_embedding(hidden_states)",
        "hidden_states = hidden_states + 0 * self.layernorm_embedding(hidden_states)",
    ),
    bug(
        "position offset of the decoder",
        "bart",
        "positions = self.embed_positions(position_ids + self.offset)",
        "positions = self.embed_positions(position_ids + self.offset - 1)",
    ),
    bug(
        "values from the decoder",
        "bart",
        "value_states = self.v_proj(key_value_states)",
        "value_states = self.v_proj(hidden_states)",
    ),
    bug(
        "embedding scale",
        "xglm",
        "math.sqrt(self.config.d_model)",
        "math.sqrt(self.config.d_model) + 1e-6",
        "inputs_embeds = self.embed_tokens(input_ids) * self.embed_scale",
    ),
    bug(
        "activation twice",
        "albert",
        "ffn_output = self.activation(ffn_output)",
        "ffn_output = self.activation(self.activation(ffn_output))",
    ),
    bug(
        "relative index of rows",
        "beit",
        "relative_coords[:, :, 1] += window_size[1] - 1",
        "relative_coords[:, :, 1] += window_size[1] - 2",
        "return jnp.array(relative_position_index)",
        "index = self.relative_position_index.reshape(-1)",
        "self.relative_position_bias_table[index]",
    ),
]


@dataclass(frozen=True)
class Outcome:
    """What the check found of a bug."""

    bug: Bug
    caught: bool
    line: int
    text: str
    report: tuple[str, ...] = field(default=())

    @property
    def located(self) -> bool:
        """Whether the reported line is the changed one, or the first that computes with it."""
        source = source_of(PORTS[self.bug.port].module)
        return self.line == self.bug.edit.line(source) or any(use in self.text for use in self.bug.use)


def examine_bug(bug: Bug) -> Outcome:
    """Plant a bug and check the port."""
    from parity import check

    with PORTS[bug.port].edited(bug.edit) as case:
        try:
            verdict = check(case, locate=True, steps=STEPS)
        except UserError as error:
            named = re.search(r"(\S+\.py):(\d+): ", str(error))
            return Outcome(bug, True, int(named[2]) if named else 0, "", (str(error),))
    found = verdict.first_divergence
    file, line, text = found.jax_source.split(":", 2) if found and found.jax_source else ("", "0", "")
    return Outcome(bug, not verdict.passed, int(line), f"{file}: {text}", verdict.lines)
