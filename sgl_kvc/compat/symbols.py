"""Every symbol of SGLang's that we import, subclass, override, call or read.

They are checked at startup (`check.py`), and a test holds this list against our source: what is
used there and missing here fails it.
"""

from __future__ import annotations

from sgl_kvc.compat.server_symbols import PLATFORM, SERVER
from sgl_kvc.compat.uses import Uses

_CACHE = (
    Uses(
        "sglang.srt.mem_cache.radix_cache.RadixCache",
        "__init__(params) reset match_prefix(params) cache_unfinished_req(req,chunked) "
        "cache_finished_req(req,is_insert,kv_len_to_handle) dec_lock_ref(node) evictable_size "
        "inc_lock_ref(node) insert(params) _delete_leaf(node) disable disable_finished_insert "
        "eviction_strategy "
        "page_size protected_size req_to_token_pool root_node token_to_kv_pool_allocator",
        "the radix cache that requests leave compressed is a subclass",
    ),
    Uses(
        "sglang.srt.mem_cache.radix_cache.RadixKey",
        "__init__(token_ids,extra_key,is_bigram,limit) token_ids extra_key is_bigram limit "
        "__len__ page_aligned(page_size)",
        "the prefix cache gives at most the prompt without its window",
    ),
    Uses("sglang.srt.mem_cache.radix_cache.TreeNode", "key", "a segment is an entry of the tree"),
    Uses("sglang.srt.mem_cache.evict_policy.EvictionStrategy", "get_priority(node)",
         "what is held is evicted last"),
    Uses("sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams", "key req",
         "the request decides how much the prefix cache may give"),
    Uses("sglang.srt.mem_cache.base_prefix_cache.MatchResult",
         "device_indices last_device_node _replace",
         "a compressed request goes on holding what it shares"),
    Uses("sglang.srt.mem_cache.base_prefix_cache.InsertParams", "key value chunked priority",
         "a segment is an entry of the tree"),
    Uses("sglang.srt.mem_cache.base_prefix_cache.InsertResult", "prefix_len",
         "a segment is an entry of the tree"),
    Uses(
        "sglang.srt.mem_cache.cache_init_params.CacheInitParams",
        "page_size token_to_kv_pool_allocator",
        "the radix cache is made of them",
    ),
    Uses(
        "sglang.srt.mem_cache.common",
        "evict_from_tree_cache(tree_cache,num_tokens) maybe_cache_unfinished_req(req)",
        "room for a segment; compression before the first decode step",
    ),
    Uses("sglang.srt.mem_cache.registry", "register_radix_cache_backend(name,factory)",
         "SGLang makes our radix cache by name"),
    Uses("sglang.srt.mem_cache.registry.TreeCacheBuildContext", "params",
         "SGLang makes our radix cache from it"),
)

_POOL = (
    Uses(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
        "__init__(kv_cache_layout) _create_buffers "
        "_store_kv_layer(layer_idx,loc,cache_k,cache_v) "
        "set_kv_buffer(layer,loc_info,cache_k,cache_v) get_contiguous_buf_infos "
        "get_cpu_copy(indices) load_cpu_copy(kv_cache_cpu,indices) "
        "move_kv_cache(tgt_loc,src_loc) set_kv_buffer_prefix_valid device dtype head_dim "
        "head_num k_buffer layer_num memory_saver_adapter page_size post_capture_active size "
        "start_layer store_dtype v_buffer v_head_dim",
        "the arena is a subclass",
    ),
    Uses("sglang.srt.mem_cache.memory_pool.ReqToTokenPool", "req_to_token",
         "rows of slots by request"),
    Uses("sglang.srt.constants", "GPU_MEMORY_TYPE_KV_CACHE", "the arena is a KV cache"),
    Uses(
        "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator",
        "alloc(need_size) alloc_decode(seq_lens,seq_lens_cpu,last_loc) "
        "alloc_extend(prefix_lens,prefix_lens_cpu,seq_lens,seq_lens_cpu,last_loc,"
        "extend_num_tokens,num_new_pages) "
        "available_size free_pages free_segment(free_index,start_pos) get_kvcache page_size "
        "size",
        "a segment's blocks are allocated and freed; the CPU's allocator is a subclass",
    ),
)

_ATTENTION = (
    Uses(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
        "forward_decode(q,k,v,layer,forward_batch,save_kv_cache) "
        "forward_extend(q,k,v,layer,forward_batch,save_kv_cache) "
        "get_cuda_graph_seq_len_fill_value init_cuda_graph_state(max_bs,max_num_tokens) "
        "init_forward_metadata(forward_batch) "
        "init_forward_metadata_out_graph(forward_batch,in_capture) support_triton",
        "our attention backends are subclasses",
    ),
    Uses("sglang.srt.layers.attention.attention_registry", "register_attention_backend(name)",
         "SGLang makes our attention backend by name"),
    Uses(
        "sglang.srt.layers.radix_attention.RadixAttention",
        "attn_type is_cross_attention layer_id logit_cap qk_head_dim scaling "
        "sliding_window_size tp_k_head_num tp_q_head_num tp_v_head_num v_head_dim",
        "an attention layer's shape, and that it is a plain one",
    ),
    Uses(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "batch_size extend_prefix_lens_cpu extend_seq_lens extend_seq_lens_cpu forward_mode "
        "out_cache_loc req_pool_indices rids seq_lens seq_lens_cpu",
        "the requests of a forward",
    ),
    Uses("sglang.srt.model_executor.forward_batch_info.ForwardMode", "is_decode_or_idle",
         "the kind of a forward"),
    Uses(
        "sglang.srt.model_executor.model_runner.ModelRunner",
        "device dtype model model_config ps req_to_token_pool server_args token_to_kv_pool",
        "pool and model of the attention backend",
    ),
    Uses("sglang.srt.distributed.parallel_state_wrapper.ParallelState", "attn_tp_rank attn_tp_size",
         "the heads this rank holds"),
    Uses("sglang.srt.configs.hybrid_arch", "mambaish_config", "which models are refused"),
    Uses("sglang.srt.configs.model_config.AttentionArch", "MHA", "which models are refused"),
    Uses(
        "sglang.srt.configs.model_config.ModelConfig",
        "attention_arch context_len get_num_attention_heads(tensor_parallel_size) "
        "get_num_kv_heads(tensor_parallel_size) get_total_num_kv_heads head_dim hf_config "
        "hf_text_config is_generation is_hybrid_swa v_head_dim vocab_size",
        "which models are refused, and their heads",
    ),
    Uses(
        "sglang.srt.utils.hf_transformers_utils",
        "get_tokenizer(tokenizer_mode,trust_remote_code)",
        "what kind of token each one is",
    ),
)

_SCHEDULER = (
    Uses(
        "sglang.srt.managers.schedule_batch.Req",
        "cache_protected_len customized_info extend_range extra_key finished "
        "full_untruncated_fill_ids get_fill_ids kv kv_committed_len last_node origin_input_ids "
        "output_ids output_ids_through_stop positional_embed_overrides prefix_indices priority "
        "req_pool_idx rid sampling_params session",
        "a request's prompt, row and place in the tree",
    ),
    Uses("sglang.srt.managers.schedule_batch.ReqKvInfo", "kv_allocated_len",
         "what a request holds is freed when it ends"),
    Uses(
        "sglang.srt.managers.schedule_batch.ScheduleBatch",
        "batch_is_full new_tokens_required_next_decode reqs tree_cache",
        "the requests that are prefilled or decode",
    ),
    Uses(
        "sglang.srt.managers.schedule_policy.PrefillAdder",
        "add_chunked_req(req) add_one_req(req,has_chunked_req) budget_state can_run_list "
        "ceil_paged_tokens(tokens) new_chunked_req rem_chunk_tokens rem_total_token_offset "
        "running_batch tree_cache",
        "a chunk ends where a question begins; what a request will hold is counted",
    ),
    Uses("sglang.srt.managers.schedule_policy", "CLIP_MAX_NEW_TOKENS",
         "how much of an answer is counted when a request is let in"),
    Uses("sglang.srt.managers.schedule_policy.AddReqResult", "OTHER",
         "a chunk ends where a question begins"),
    Uses(
        "sglang.srt.managers.scheduler.Scheduler",
        "_request_dispatcher chunked_req enable_overlap forward_stream "
        "get_num_allocatable_reqs(running_bs) init_request_dispatcher max_total_num_tokens "
        "model_config process_batch_result(batch,result) running_batch server_args "
        "token_to_kv_pool_allocator tree_cache waiting_queue",
        "whether pool and radix cache are ours; when requests are admitted",
    ),
    Uses("sglang.utils.TypeBasedDispatcher", "_mapping",
         "an operator's request that fails is answered"),
    Uses("sglang.srt.managers.io_struct",
         "GenerateReqInput ProfileReqOutput SetInternalStateReqOutput",
         "programs on an engine; an operator's request that fails is answered; a stored segment "
         "is released"),
    Uses(
        "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator",
        "accept(req)",
        "the report rides on the last output token",
    ),
    Uses(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator",
        "_build_mha_kv_pool(mha_pool_class) _profile_available_bytes(pre_model_load_memory) gpu_id "
        "kv_cache_dtype layer_info model_config page_size ps server_args",
        "the pool is ours, and leaves room for decode's buffers",
    ),
    Uses(
        "sglang.srt.sampling.sampling_params.SamplingParams",
        "custom_params logit_bias max_new_tokens min_new_tokens normalize(tokenizer) "
        "stop_token_ids stream_interval top_k verify(vocab_size)",
        "the knob arrives in them; some of their values would end the scheduler",
    ),
    Uses(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo",
        "acc_additive_penalties acc_scaling_penalties apply_logits_bias(logits) grammar_mask "
        "logit_bias penalizer_orchestrator",
        "logits that cannot be sampled from are mended",
    ),
    Uses(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner",
        "_resolve_lora_variant(forward_batch) can_run_graph(forward_batch) "
        "capture_one_shape(size,forward,stream_idx,variant_label) model_runner",
        "a captured step has a variant that adds to the metric",
        gpu=True,
    ),
    Uses(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner",
        "can_run_graph(forward_batch) model_runner",
        "prompts that are compressed are prefilled without graphs",
        gpu=True,
    ),
)

SYMBOLS = (*_CACHE, *_POOL, *_ATTENTION, *_SCHEDULER, *SERVER, *PLATFORM)

#: Of the frontend, for `sgl_kvc.lang`; serving does without.
FRONTEND = (
    Uses("sglang.global_config", "global_config", "how answers are turned into text"),
    Uses("sglang.lang", "api interpreter", "programs with a knob"),
    Uses("sglang.lang.api", "gen select", "a knob of their own"),
    Uses("sglang.lang.backend", "runtime_endpoint", "our backends of programs are subclasses"),
    Uses("sglang.lang.backend.base_backend.BaseBackend", "__init__", "an engine is a backend"),
    Uses(
        "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint",
        "__init__(base_url,api_key,verify) _add_images(s,data) _assert_success(res) "
        "_generate_http_request(s,data) _handle_dtype_to_regex(sampling_params) api_key base_url "
        "cache_prefix(prefix_str) chat_template commit_lazy_operations(s) fill_image(s) "
        "flush_cache generate(s,sampling_params) generate_stream(s,sampling_params) "
        "get_model_name get_server_info model_info select(s,choices,temperature,choices_method) "
        "support_concate_and_append verify",
        "our backends of programs are subclasses",
    ),
    Uses("sglang.lang.chat_template",
         "get_chat_template(name) get_chat_template_by_model_path(model_path)",
         "an engine is a backend"),
    Uses("sglang.lang.choices", "ChoicesDecision ChoicesSamplingMethod", "choices are reported"),
    Uses("sglang.lang.choices.ChoicesDecision", "meta_info", "choices are reported"),
    Uses("sglang.lang.interpreter.StreamExecutor",
         "submit(expr) fork(size,position_ids_offset) _execute(other) backend text_",
         "our executor of programs is a subclass"),
    Uses("sglang.lang.ir", "SglExpr SglGen SglSelect", "expressions get a knob"),
    Uses("sglang.lang.ir.SglExprList", "__init__(expr_list) expr_list", "expressions get a knob"),
    Uses("sglang.lang.ir.SglSamplingParams", "to_srt_kwargs", "what is sent to a server"),
    Uses("sglang.utils", "http_request(url,json,stream,api_key,verify)",
         "what is sent to a server"),
)
