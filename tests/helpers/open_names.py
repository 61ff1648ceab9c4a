"""What extensions use of the kernel besides public names and those of ``fnloop.extend``.

A name that is not here is private to the kernel: change it as you like, and let no extension import
it. One that no extension uses any more goes out. The table may only shrink.
"""

OPEN = {
    "_backend": "torch_compat",
    "_backend.fsdp": "around_sharded combined like_sharded roots",
    "_backend.processes": "trackers",
    "_checkpoint": "retention",
    "_checkpoint.files": (
        "CHECKPOINT_NAME checksum_of_manifest decode_history FOLDER locate mark_of OBJECTS "
        "read_manifest remove_checkpoint SendFiles SharedWrite"
    ),
    "_checkpoint.format": (
        "check_shape Contents COUNT is_file_name LARGEST_MANIFEST MANIFEST NewerFormatError "
        "NUMBER PARTS shares_in"
    ),
    "_checkpoint.named": "walk_optimizers",
    "_checkpoint.parts": "decode_targets held_parts read_parts Targets",
    "_checkpoint.place": "Place place_at READING Tidy",
    "_checkpoint.restore": "read_alone read_checkpoint restore_contents resume_at SHAPES",
    "_checkpoint.retention": "CLAIM read_run_id RunFolder with_manifests",
    "_checkpoint.save": "check_resumable check_saveable collect_contents position_of versions",
    "_checkpoint.saved": "Saved",
    "_core.averages": "Average AVERAGED named_tensors",
    "_core.code": "codes_of INSTALLED is_users PACKAGE",
    "_core.cursor": "COUNTERS",
    "_core.freeze": "Selectors",
    "_core.history": (
        "check_monitored decode_phases first_record metrics_here new_records records_since "
        "SINCE unfinished"
    ),
    "_core.metrics": (
        "COLLECTION_HINT combine Elapsed ITEMS Mark mark names_in NoLoss Peak read RECENT "
        "Reduced sent Shares to_accumulator_dtype to_host update_ update_evaluated_ "
        "valid_or_nan weighted"
    ),
    "_core.optimizers": (
        "begin_again copy_number first_shared Group groups_in initial_value "
        "is_torch_optimizer keep_initial modes_of note_set numbers_used Optimizers put_number "
        "RATIO SCHEDULED wants_closure"
    ),
    "_core.parts": "Load OWN Restoring Saving set_fields TAKEN",
    "_core.records": "COSTS counts MODES number_of_epoch TRAINED",
    "_core.rng": (
        "COMPUTE HostGenerators mark_generators reserved_generators seed_host torch_seeder"
    ),
    "_core.runs": "has_updates Live now pending",
    "_core.serialize": (
        "as_number decode describe_value encode find_difference has_pending INTEGER_OF_SIZE "
        "Json materialize Measured Pending"
    ),
    "_core.several": "models_of Several",
    "_core.shapes": "forget_states take_shapes",
    "_core.state": (
        "advance check_alike clear_parameter_cache count_parameters current_parameters "
        "generation_of give_up_ownership LEFT_OUT moved note_call Ownership ownership_of "
        "owns_handles ParameterCache PLACE rested take_ownership tracing_copy used_in "
        "with_note with_used without_metrics"
    ),
    "_core.types": "Aux BY_ANOTHER Call collection_key hide_fields is_ours Searching Skip",
    "_core.view": "as_evaluated begin_again is_apart take_back view",
    "_data.composed": "unmarked",
    "_data.held": "own_copy",
    "_data.iterable": "is_keeper",
    "_data.loaders": "batch_size_of check_loader Padding read_loaders Window",
    "_data.position": "checksum",
    "_data.source": "first_batches LateWindow open_source Source",
    "_display.frames": "short_traceback",
    "_display.screen": "warn_once",
    "_hooks.hook": "BuiltIn Clock every_layer HookFn Wrapper",
    "_loop.beginning": "fused_hint",
    "_loop.errors": "check_returned why_empty",
    "_loop.evaluate": "open_loader",
    "_loop.fit": "train",
    "_loop.made_with": "describe_making members_of",
    "_loop.peers": "forget_interruption is_alone",
    "_loop.plan": "Plan read_hooks",
    "_step.engine_local": "LocalEngine",
    "_step.forward": (
        "check_reply check_weight EvaluationPass items_in NO_ITEMS Result Subject SumOfBatches"
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
