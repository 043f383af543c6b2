"""Which keys of a config.json are understood; light to import.

Every key must be one that `architecture` reads, one that no computation of the family depends on,
or one that is switched off. Any other might change the logits, so it is refused, not ignored.
"""

from typing import Any

from megatron_credit.mcore.config_file import ConfigFile


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

# Of transformers' classes.
_DEFAULT_WINDOW = 4096
_DEFAULT_WINDOW_LAYERS = 28

# Fields of an Architecture, of its rotary positions and of its attention windows.
_READ = _words(
    """
    model_type architectures num_hidden_layers hidden_size intermediate_size num_attention_heads
    num_key_value_heads head_dim vocab_size max_position_embeddings rms_norm_eps tie_word_embeddings
    rope_theta rope_scaling rope_parameters partial_rotary_factor
    original_max_position_embeddings sliding_window use_sliding_window max_window_layers layer_types
    """
)

_READ_OF_EXPERTS = _words(
    """
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    decoder_sparse_step mlp_only_layers router_aux_loss_coef output_router_logits
    """
)

_HARMLESS = _words(
    """
    torch_dtype dtype transformers_version use_cache initializer_range name_or_path auto_class
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id
    decoder_start_token_id tokenizer_class prefix model_max_length max_sequence_length
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    return_dict use_return_dict output_attentions output_hidden_states torchscript tf_legacy_loss
    use_bfloat16 attn_implementation unsloth_fixed unsloth_version transformers.js_config
    temperature top_k top_p typical_p repetition_penalty length_penalty do_sample num_beams
    num_beam_groups num_return_sequences max_length min_length max_new_tokens early_stopping
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens
    begin_suppress_tokens diversity_penalty forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty output_scores return_dict_in_generate
    chunk_size_feed_forward is_llama_config
    """
)
# Of training, and off in ours: scoring, training and the engine compute the same function.
_HARMLESS |= {"attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop"}
# Shards of one product that transformers once summed one by one.
_HARMLESS |= {"pretraining_tp"}

# What else changes the computation, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_causal": (True,),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "rope_interleaved": (False,),
    "rope_is_neox_style": (True,),
    "use_mrope": (False,),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "num_nextn_predict_layers": (0,),
}

_AFTER_THE_HEAD = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "dim_model_base",
)


def refuse_unsupported(file: ConfigFile, family: str) -> None:
    """ValueError for the first key that may make the model another one than is computed here."""
    known = _READ | _HARMLESS
    if family == "qwen3_moe":
        known |= _READ_OF_EXPERTS
    if family == "qwen2":
        # Qwen2 has its biases whatever this says.
        known |= {"attention_bias"}
    _check_architectures(file, family)
    for key, value in file.fields.items():
        is_off = value is None or value in ([], {})
        if not (is_off or key in known or key.startswith("_")):
            _check_key(file, key, value)


def refuse_scaled_logits(file: ConfigFile) -> None:
    """ValueError where the logits are more than hidden states times weights, which is what our
    output head computes whoever built the model."""
    for key in _AFTER_THE_HEAD:
        if file.has(key) and file.fields[key] not in (1, 0):
            raise file.refusal(
                key, f"is {file.fields[key]!r}; logits that are scaled or capped are not supported"
            )


def refuse_sliding_window(file: ConfigFile, family: str, max_positions: int) -> None:
    """ValueError where a layer attends to fewer tokens than a sequence can have."""
    kinds = file.value("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise file.refusal("layer_types", f"is {kinds!r}; only full_attention is supported")
    window = _window(file, family)
    if window is not None and window < max_positions:
        raise file.refusal(
            "sliding_window",
            f"is {window}, below the model's {max_positions} positions; sliding windows are not "
            "supported, only full attention is",
        )


def _window(file: ConfigFile, family: str) -> int | None:
    """Tokens that a layer attends to; None: all before it."""
    if family.startswith("qwen"):
        if not file.switch("use_sliding_window", False):
            return None
        # The experts' family knows no list of layers: all of them slide.
        if family != "qwen3_moe" and _all_layers_full(file):
            return None
    if "sliding_window" not in file.fields:
        return None if family == "llama" else _DEFAULT_WINDOW
    return file.count("sliding_window") if file.has("sliding_window") else None


def _all_layers_full(file: ConfigFile) -> bool:
    if file.has("layer_types"):
        return True
    first_sliding = file.fields.get("max_window_layers", _DEFAULT_WINDOW_LAYERS)
    if isinstance(first_sliding, bool) or not isinstance(first_sliding, int):
        raise file.refusal("max_window_layers", f"is {first_sliding!r}, expected a whole number")
    return first_sliding >= file.count("num_hidden_layers")


def _check_architectures(file: ConfigFile, family: str) -> None:
    found, expected = file.value("architectures", []), [_ARCHITECTURES[family]]
    if found not in ([], expected):
        raise file.refusal("architectures", f"is {found!r}, expected {expected}")


def _check_key(file: ConfigFile, key: str, value: Any) -> None:
    if key == "quantization_config":
        raise file.refusal(key, "is set; only unquantised checkpoints can be trained")
    if key not in _NEUTRAL:
        raise file.refusal(
            key,
            f"is {value!r}; this key is not known here and may change what the model computes; "
            "delete it if it does not",
        )
    if value not in _NEUTRAL[key]:
        expected = " or ".join(repr(each) for each in _NEUTRAL[key])
        raise file.refusal(key, f"is {value!r}, which is not supported; expected {expected}")
