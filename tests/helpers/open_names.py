"""What extensions use of the kernel besides public names and those of ``fnloop.extend``.

A name that is not here is private to the kernel: change it as you like, and let no extension import
it. One that no extension uses any more goes out. The table may only shrink.
"""

OPEN = {
    "_backend": "accelerated torch_compat",
    "_backend.fsdp": "combined dtensor full has_sharded like_sharded",
    "_backend.processes": "Backend device_of",
    "_backend.torch_compat": "buffers_of strip_compile_prefix",
    "_core.averages": "Average AVERAGED check_not_averaged named_tensors",
    "_core.code": "codes_of INSTALLED is_users PACKAGE",
    "_core.history": "first_record metrics_here new_records records_since SINCE unfinished",
    "_core.metrics": (
        "combine ITEMS moved NoLoss read RECENT Reduced restored Running sent Shares "
        "to_accumulator_dtype to_host update_ update_evaluated_ valid_or_nan weighted"
    ),
    "_core.optimizers": "first_shared Optimizers",
    "_core.records": "COSTS MODES number_of_epoch TRAINED",
    "_core.rng": (
        "COMPUTE HostGenerators mark_generators new_seed reserved_generators seed_all "
        "seed_host seeded_generator torch_seeder"
    ),
    "_core.runs": "ACTIONS has_updates Live now pending RECORDS",
    "_core.selectors": "Selectors",
    "_core.several": "models_of Reply Several",
    "_core.state": (
        "advance clear_parameter_cache count_items count_parameters COUNTED counted_of "
        "COUNTERS current_parameters detached_from_run generation_of give_up_ownership "
        "items_to_send LEFT_OUT note_buffers note_call Ownership ownership_of owns_handles "
        "ParameterCache PLACE rested shapes_of_buffers take_ownership used_in with_note "
        "with_used without_metrics"
    ),
    "_core.types": "Aux EVALUATION is_ours Searching Skip wraps_of",
    "_core.view": "as_evaluated begin_again changed_for is_apart take_back",
    "_data.held": "own_copy",
    "_data.iterable": "as_torch_reads_it is_keeper length_of steady_workers",
    "_data.loaders": (
        "alike batch_size_of check_loader First Glimpse glimpse is_iterable NONE_LEFT Padding "
        "Place read_loaders SingleProcess unmarked Window"
    ),
    "_data.position": "checksum Pass Positions",
    "_data.reader": "Iterated Reader reader_of",
    "_data.source": "first_batches LateWindow open_source Source unmoved",
    "_display.frames": "short_traceback",
    "_display.screen": "log",
    "_hooks.hook": "BuiltIn Clock every_layer HookFn Wrapper",
    "_loop.beginning": "fused_hint",
    "_loop.errors": "check_returned why_empty",
    "_loop.evaluate": "open_loader",
    "_loop.fit": "train",
    "_loop.made_with": "describe_making members_of",
    "_loop.peers": "forget_interruption Interrupts is_alone",
    "_loop.plan": "Plan read_hooks",
    "_step.engine": "GradientSum",
    "_step.forward": "items_in",
    "_step.gradients": "NoGradientError WeightedSum",
    "_step.pipeline": "Pipeline PipelineStep",
    "_step.update": "MissingNumberError Numbers prefixed",
}
