"""What extensions use of the kernel besides public names and those of ``fnloop.extend``.

A name that is not here is private to the kernel: change it as you like, and let no extension import
it. One that no extension uses any more goes out. The table may only shrink.
"""

OPEN = {
    "_backend.containers": "SEQUENCES",
    "_core.averages": "Average AVERAGED check_not_averaged named_tensors",
    "_core.code": "codes_of INSTALLED is_users PACKAGE",
    "_core.history": "first_record metrics_here new_records records_since SINCE unfinished",
    "_core.optimizers": "first_shared Group Optimizers",
    "_core.parts": "check_name Held Load TAKEN",
    "_core.records": "COSTS MODES number_of_epoch TRAINED",
    "_core.rng": (
        "COMPUTE HostGenerators mark_generators new_seed reserved_generators seed_all "
        "seed_host seeded_generator torch_seeder"
    ),
    "_core.runs": "ACTIONS has_updates RECORDS",
    "_core.saved": "has_pending materialize Pending",
    "_core.selectors": "Selectors",
    "_core.settings": "UNFROZEN",
    "_core.several": "models_of Reply Several",
    "_core.state": (
        "clear_parameter_cache count_parameters COUNTED counted_of COUNTERS "
        "current_parameters detached_from_run LEFT_OUT note_call ParameterCache PLACE rested "
        "used_in with_used without_metrics"
    ),
    "_core.trained": "add_group Groups Layout note_restored split_group",
    "_core.types": "Aux is_ours Searching Skip",
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
    "_hooks.hook": "HookFn",
    "_loop.beginning": "fused_hint",
    "_loop.errors": "check_returned why_empty",
    "_loop.evaluate": "open_loader",
    "_loop.fit": "train",
    "_loop.made_with": "describe_making members_of",
    "_loop.peers": "is_alone",
    "_loop.plan": "Plan",
}
