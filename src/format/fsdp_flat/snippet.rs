//! What to do where nothing tells how a model was laid into flat parameters.

use crate::error::Error;

/// The way out, with the program that writes a flat layout.
const HINT: &str = "\
give --flat-layout FILE, or --like CKPT: a torch file of the same model tells shapes and order, any other format shapes.
docs/fsdp1.md has the Python snippet that writes it from a live model; where every parameter is row-major, this does:
    units = []
    for name, module in model.named_modules():
        if isinstance(module, FSDP) and module._handle:
            flat, clean = module._handle.flat_param, name.replace(\"_fsdp_wrapped_module.\", \"\")
            clean = clean.removesuffix(\"_fsdp_wrapped_module\").removesuffix(\".\")
            join = lambda *path: \".\".join(filter(None, (clean, *path)))
            units.append({\"module\": clean, \"align_numel\": module._handle._aligned_numel or None,
                \"params\": [{\"fqn\": join(n), \"shape\": list(s)} for n, s in zip(flat._fqns, flat._shapes)]
                + [{\"fqn\": join(s.module_name, s.param_name),
                    \"shared_with\": join(s.prim_module_name, s.prim_param_name)} for s in flat._shared_param_infos]})
    json.dump({\"version\": 1, \"world_size\": dist.get_world_size(), \"use_orig_params\": model._use_orig_params,
        \"units\": units}, open(\"flat_layout.json\", \"w\"))";

/// Refuse to guess.
#[must_use]
pub fn refuse(what: impl Into<String>) -> Error {
    Error::unsupported(what, HINT)
}
