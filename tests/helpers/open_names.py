"""What extensions use of the kernel besides public names and those of ``fnloop.extend``.

A name that is not here is private to the kernel: change it as you like, and let no extension import
it. One that no extension uses any more goes out. The table may only shrink.
"""

OPEN = {
    "_backend": "torch_compat",
    "_backend.collectives": (
        "counts_here gather_from_all on_every_process rank_and_size start_all_reduce_max"
    ),
    "_backend.containers": (
        "attributes_of has_room is_out_of_memory map_leaves pairs_of parts_of with_parts"
    ),
    "_backend.disk": (
        "checksum_of_file exists flush flushed_file is_folder lock_file make_folder "
        "map_with_help replace_file size_of_file status try_lock"
    ),
    "_backend.fsdp": "combined dtensor full has_sharded like_sharded",
    "_backend.processes": "Backend device_of",
    "_backend.torch_compat": (
        "buffers_of has_state_dict_hooks is_extra_state loads_by_itself loads_other_names "
        "local_optimizer strip_compile_prefix"
    ),
    "_core.averages": "Average AVERAGED named_tensors",
    "_core.code": "codes_of INSTALLED is_users PACKAGE",
    "_core.cursor": "check_counts COUNTERS CURSOR Cursor",
    "_core.freeze": "add_group Groups remember_restored Selectors split_group",
    "_core.history": (
        "check_monitored decode_phases encode_phases first_record metrics_here new_records "
        "records_since SINCE unfinished"
    ),
    "_core.metrics": (
        "COLLECTION_HINT combine Elapsed ITEMS Mark mark names_in NoLoss Peak read RECENT "
        "Reduced restored sent Shares to_accumulator_dtype to_host update_ update_evaluated_ "
        "valid_or_nan weighted"
    ),
    "_core.optimizers": (
        "BEFORE begin_again copy_number drop_schedule EXECUTION first_shared Group groups_in "
        "initial_setting initial_value is_torch_optimizer keep_initial modes_of note_set "
        "numbers_used Optimizers optimizers_in put_number RATIO SCHEDULED SET set_by_torch "
        "settings_of to_training UNFROZEN wants_closure"
    ),
    "_core.parts": (
        "COLLECTED Held held Load load_nothing NEWER_FORMAT NEWEST_FORMAT OWN parts_of "
        "Restoring Saving set_fields SHARDED_FORMAT TAKEN TENSORS TRAINING_FORMAT"
    ),
    "_core.records": "COSTS counts MODES number_of_epoch TRAINED",
    "_core.rng": (
        "COMPUTE HostGenerators mark_generators reserved_generators seed_host torch_seeder"
    ),
    "_core.runs": (
        "decode_stop decode_todo encode_stop encode_todo has_updates Live now pending "
        "todo_of_before"
    ),
    "_core.serialize": (
        "as_number as_parts as_safetensor AsParts copy_flattened decode describe_value "
        "dtype_named encode find_difference flattened_kind from_flattened from_safetensor "
        "has_pending INTEGER_OF_SIZE is_flattened Json kinds_in materialize Measured PAIRS "
        "Pending plain_only plain_or_flattened tensors_in"
    ),
    "_core.several": "models_of Several",
    "_core.shapes": "forget_states resized Shapes take_shapes",
    "_core.state": (
        "advance clear_parameter_cache count_items count_parameters current_parameters "
        "detached_from_run generation_of give_up_ownership items_to_send LEFT_OUT moved "
        "note_buffers note_call note_restored Ownership ownership_of owns_handles "
        "ParameterCache PLACE rested shapes_of_buffers take_ownership tracing_copy used_in "
        "with_note with_used without_metrics"
    ),
    "_core.types": (
        "Aux BY_ANOTHER Call collection_key EVALUATION hide_fields is_ours Searching Skip "
        "wraps_of"
    ),
    "_core.view": "as_evaluated begin_again changed_for is_apart take_back view",
    "_data.composed": "unmarked",
    "_data.held": "own_copy",
    "_data.iterable": "is_keeper",
    "_data.loaders": "batch_size_of check_loader Padding read_loaders Window",
    "_data.position": "checksum",
    "_data.source": "first_batches LateWindow open_source Source",
    "_display.checks": "choice describe flag folder_path is_address join_names metric_name",
    "_display.frames": "short_traceback",
    "_display.screen": "log warn_once",
    "_hooks.hook": "BuiltIn Clock every_layer HookFn Wrapper",
    "_loop.beginning": "fused_hint",
    "_loop.errors": "check_returned why_empty",
    "_loop.evaluate": "open_loader",
    "_loop.fit": "train",
    "_loop.made_with": "describe_making members_of",
    "_loop.peers": "forget_interruption Interrupts is_alone",
    "_loop.plan": "Plan read_hooks",
    "_step.engine_local": "LocalEngine",
    "_step.forward": (
        "check_reply check_weight EvaluationPass items_in NO_ITEMS Result Subject "
        "SumOfBatches"
    ),
    "_step.gradients": (
        "clip_to_norm_ divide fail_to_train GradientSum LocalWindow LossRoot NO_GRADIENT "
        "NoGradientError Pass pieces_of restore_gradients rows_of samples_in skipped_with "
        "stash_gradients SumInOrder valid_weight Weight WeightedSum"
    ),
    "_step.pipeline": "Pipeline PipelineStep STEP",
    "_step.transaction": (
        "current_attempt decide_any in_parts is_recorded Judge leaves_graphs_out PutBack "
        "repeating replace_host settle skip_together undo without_graphs"
    ),
    "_step.update": (
        "Backward Commuting Insertable MissingNumberError Numbers prefixed replace_apply"
    ),
}
