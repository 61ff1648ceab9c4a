"""What extensions use of the kernel besides public names and those of ``fnloop.extend``.

A name that is not here is private to the kernel: change it as you like, and let no extension import
it. One that no extension uses any more goes out. The table may only shrink.
"""

OPEN = {
    "_backend.fsdp": "like_sharded",
    "_backend.torch_compat": "strip_compile_prefix",
    "_core.code": "codes_of is_of_library walk",
    "_core.optimizers": "first_shared Group Optimizers",
    "_core.parts": "Load",
    "_core.runs": "Action Append",
    "_core.selectors": "Selectors",
    "_core.state": "copy_handles counted_of",
    "_core.types": "Aux Searching Skip",
    "_core.view": "begin_again changed_for is_apart",
    "_hooks.hook": "every_layer LiftedHook slots_of unwrap_hook",
    "_loop.errors": "check_returned",
    "_loop.evaluate": "open_loader",
}
