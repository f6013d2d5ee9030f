"""Of SGLang's symbols those of its HTTP process, its arguments and its platforms."""

from __future__ import annotations

from sgl_kvc.compat.uses import Uses

SERVER = (
    Uses(
        "sglang.srt.server_args.ServerArgs",
        "_cuda_graph_config_locked _generate_decode_cuda_graph_batch_sizes(max_bs) admin_api_key "
        "api_key attention_backend attn_cp_size cuda_graph_backend_prefill cuda_graph_config "
        "dcp_size decode_attention_backend device disable_cuda_graph_padding disable_radix_cache "
        "disaggregation_mode dllm_algorithm dtype enable_dp_attention enable_flexkv "
        "enable_hierarchical_cache enable_hisparse enable_lmcache enable_lora enable_mis "
        "enable_page_major_kv_layout enable_pdmux enable_prefill_cp enable_session_radix_cache "
        "enable_streaming_session enable_torch_compile enable_two_batch_overlap "
        "enable_unified_memory get_attention_backends get_model_config kv_cache_dtype kv_canary "
        "lora_paths max_running_requests model_path page_size pp_size prefill_attention_backend "
        "prefill_only_disable_kv_cache quantization_param_path radix_cache_backend revision "
        "sampling_backend skip_tokenizer_init sleep_on_idle speculative_algorithm tokenizer_mode "
        "tokenizer_path tp_size trust_remote_code",
        "options that are implied, read or refused",
    ),
    Uses("sglang.srt.server_args", "add_attention_backend_choices(choices)",
         "--attention-backend takes our name"),
    Uses("sglang.srt.runtime_context", "get_exec", "whether this process serves with ours"),
    Uses(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager",
        "_create_tokenized_object _validate_one_request(obj,input_ids) "
        "generate_request(obj,request) model_config server_args",
        "the knob is validated and the report lifted there",
    ),
    Uses(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter",
        "current_scheduler_metrics_enabled scheduler",
        "metrics of the pool's blocks go with its own",
    ),
    Uses(
        "sglang.srt.managers.io_struct.GenerateReqInput",
        "extra_key normalize_batch_and_arguments sampling_params session_params",
        "the gateway's headers are put into it; some of its values would end the scheduler",
    ),
    Uses("sglang.srt.managers.io_struct.SessionParams", "", "its fields' names and types"),
    Uses("sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat",
         "_convert_to_internal_request(request,raw_request) "
         "_process_messages(request,is_multimodal)",
         "the tokens of a chat's last message are counted"),
    Uses("sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest", "input_ids messages",
         "the tokens of a chat's last message are counted"),
    Uses("sglang.srt.plugins.hook_registry.HookRegistry", "register(target,hook,hook_type)",
         "hooks are taken with it"),
    Uses("sglang.srt.plugins.hook_registry.HookType", "BEFORE AFTER AROUND",
         "hooks are taken with it"),
)

PLATFORM = (
    Uses("sglang.srt.platforms.cpu.CpuDeviceMixin", "_enum device_type get_device(local_rank)",
         "the CPU platform is a subclass"),
    Uses("sglang.srt.platforms.device_mixin.PlatformEnum", "OOT",
         "the CPU platform is out of SGLang's tree"),
    Uses(
        "sglang.srt.platforms.interface.SRTPlatform",
        "apply_server_args_defaults(server_args) get_compile_backend "
        "get_default_attention_backend get_mha_kv_pool_cls get_paged_allocator_cls "
        "get_torch_profiler_activity get_torch_profiler_activity_str",
        "the CPU platform is a subclass",
    ),
)
