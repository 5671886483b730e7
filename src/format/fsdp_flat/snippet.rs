//! What to do where nothing tells how a model was laid into flat parameters.

use crate::error::Error;

/// The way out, with the program that writes a flat layout.
const HINT: &str = r#"give --flat-layout FILE, or --like CKPT: a torch file of the same model tells shapes and order, others shapes
    docs/fsdp1.md has the Python snippet that writes it from a live model; in short, where no parameter is channels_last:
        units = []
        for name, module in model.named_modules():
            if isinstance(module, FSDP) and module._handle:
                name = re.sub(r"\.?_fsdp_wrapped_module\b", "", name).lstrip(".")
                flat, join = module._handle.flat_param, lambda *path: ".".join(filter(None, (name, *path)))
                params = [{"fqn": join(n), "shape": list(s)} for n, s in zip(flat._fqns, flat._shapes)]
                params += [{"fqn": join(s.module_name, s.param_name),
                            "shared_with": join(s.prim_module_name, s.prim_param_name)}
                           for s in flat._shared_param_infos]
                units.append({"module": name, "align_numel": module._handle._aligned_numel or None, "params": params})
        layout = {"version": 1, "world_size": dist.get_world_size(), "shard_group_size": model._handle.world_size,
                  "use_orig_params": model._use_orig_params, "units": units}
        json.dump(layout, open("flat_layout.json", "w"))"#;

/// Refuse to guess.
#[must_use]
pub fn refuse(what: impl Into<String>) -> Error {
    Error::unsupported(what, HINT)
}
