"""What extensions use of the kernel besides public names and those of ``fnloop.extend``.

A name that is not here is private to the kernel: change it as you like, and let no extension import
it. One that no extension uses any more goes out. The table may only shrink.
"""

OPEN = {
    "_backend.containers": "SEQUENCES",
    "_backend.fsdp": "like_sharded",
    "_core.code": "codes_of is_of_library walk",
    "_core.optimizers": "first_shared Group Optimizers",
    "_core.parts": "check_name Held Load TAKEN",
    "_core.runs": "Action Append",
    "_core.saved": "has_pending materialize Pending",
    "_core.selectors": "Selectors",
    "_core.settings": "UNFROZEN",
    "_core.state": "copy_handles counted_of",
    "_core.trained": "add_group Groups Layout note_restored split_group",
    "_core.types": "Aux Searching Skip",
    "_core.view": "begin_again changed_for is_apart",
    "_hooks.hook": "every_layer LiftedHook slots_of unwrap_hook",
    "_loop.errors": "check_returned",
    "_loop.evaluate": "open_loader",
}
