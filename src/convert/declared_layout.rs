//! Declared layout of plain tensors in SRC, parsed from `--src-mesh`, `--src-placements`, `--reduce` and similar
//! options. Files with plain tensors do not record how the tensors are sharded.

use std::path::Path;

use super::parallelize_plan::PlanOptions;
use super::placements;
use crate::convert::options::SourceLayoutOptions;
use crate::error::{Error, Result};
use crate::format::DeclaredLayout;
use crate::format::declared_layout::ReduceRule;
use crate::layout::file::LayoutFile;
use crate::layout::parallelize::RoleNames;
use crate::layout::{DeviceMesh, PlacementSpec, Rank, ReduceOp, Split, comma_list};

/// Returns the declared layout, or `None` if no option declares one.
///
/// # Errors
/// `Layout` and `Usage` for invalid or contradicting options, and errors from reading a layout file.
pub fn declared_layout(args: &SourceLayoutOptions, keep_names: bool) -> Result<Option<DeclaredLayout>> {
    let SourceLayoutOptions { src_mesh, src_mesh_ranks, src_placements, src_plan, src_split, src_layout, reduce } =
        args;
    let says_how = !src_placements.is_empty() || !reduce.is_empty() || src_plan.is_some() || src_layout.is_some();
    let given = [
        ("options::src_mesh", src_mesh.is_some()),
        ("options::src_mesh_ranks", !src_mesh_ranks.is_empty()),
        ("options::src_split", src_split.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        None if !says_how => return Ok(None),
        Some((option, _)) if !says_how => {
            return Err(Error::usage(
                format!(
                    "{option} needs options::src_placements, options::src_plan, options::src_layout or options::reduce"
                ),
                "declare how tensors are sharded with options::src_placements, for example '**.w1=S(0)' (one rule for \
                 each kind of sharded tensor), or with options::src_plan NAME, options::src_layout FILE or options::reduce",
            ));
        }
        _ => {}
    }
    let (rules, fallback) = placements::read("options::src_placements", src_placements)?;
    let split = src_split.clone();
    let file = src_layout.as_deref().map(|path| file(path, split.clone())).transpose()?;
    let mesh = mesh(args)?;
    let fallback = fallback.map(|list| (said("options::src_placements", &list), list));
    let of_file = || {
        let list = file.as_ref()?.fallback(mesh.as_ref())?;
        Some((said(&src_layout.as_ref()?.display().to_string(), &list), list))
    };
    let fallback = fallback.or_else(of_file).map(|(said, list)| (list, said));
    let reduce: Vec<ReduceRule> = reduce.iter().map(|text| parse_reduce(text)).collect::<Result<_>>()?;
    let plan = plan_of(args, &reduce).draft(file.as_ref())?;
    Ok(Some(DeclaredLayout { mesh, rules, fallback, split, plan, file, reduce, keep_names }))
}

fn plan_of<'a>(args: &'a SourceLayoutOptions, reduce: &[ReduceRule]) -> PlanOptions<'a> {
    // A mesh dim along which ranks hold partial values does not shard tensors, so it need not have a role in the plan.
    let unused = reduce.iter().flat_map(|reduce| reduce.dims.iter().cloned()).collect();
    let names = RoleNames { unused, ..RoleNames::default() };
    PlanOptions {
        plan: args.src_plan.as_deref(),
        option: "options::src_plan",
        layout_option: "options::src_layout",
        names,
    }
}

/// Returns the name of a placement list in messages: the option or layout file that gives the list, and the list
/// itself, for example `--src-placements S(0),R`.
fn said(by: &str, list: &[PlacementSpec]) -> String {
    format!("{by} {}", comma_list(list))
}

fn file(path: &Path, split: Option<Split>) -> Result<LayoutFile> {
    let hint = "use options::flat_layout for flat parameters; for plain tensors, declare a mesh and placements: \
                docs/reference/layout-file.md";
    placements::file("options::src_layout", path, split, hint)
}

fn mesh(args: &SourceLayoutOptions) -> Result<Option<DeviceMesh>> {
    let mesh = args.src_mesh.as_deref().map(DeviceMesh::parse).transpose()?;
    if args.src_mesh_ranks.is_empty() {
        return Ok(mesh);
    }
    let Some(mesh) = mesh else {
        return Err(Error::usage(
            "options::src_mesh_ranks needs options::src_mesh",
            "use both, for example options::src_mesh dp=2,tp=2 options::src_mesh_ranks 0,2,1,3",
        ));
    };
    let ranks = args.src_mesh_ranks.iter().map(|rank| Rank(*rank)).collect();
    Ok(Some(mesh.with_ranks(ranks)?))
}

/// Parses a reduce rule, for example `dp,cp=avg`.
fn parse_reduce(text: &str) -> Result<ReduceRule> {
    let (dims, op) = match text.split_once('=') {
        Some((dims, op)) => (dims, ReduceOp::from_name(op.trim())),
        None => (text, Some(ReduceOp::Sum)),
    };
    let dims: Vec<String> = dims.split(',').map(|dim| dim.trim().to_owned()).collect();
    match op {
        Some(op) if dims.iter().all(|dim| !dim.is_empty()) => Ok(ReduceRule { dims, op }),
        _ => Err(Error::usage(
            format!("options::reduce {text}: expected names of mesh dims, and optionally a reduction op"),
            "use for example options::reduce dp for sums, or options::reduce dp,cp=avg for averages; the ops are sum, avg, max, \
             min and product",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reduce_rule_is_parsed_into_dims_and_op() {
        let read = |text: &str| parse_reduce(text).map(|reduce| (reduce.dims.join("+"), reduce.op));
        assert_eq!(read("dp").unwrap(), ("dp".to_owned(), ReduceOp::Sum));
        assert_eq!(read("dp, cp=AVG").unwrap(), ("dp+cp".to_owned(), ReduceOp::Avg));
        for wrong in ["", "dp=mean", "dp,=sum", "=sum", "dp=sum=avg"] {
            assert!(read(wrong).unwrap_err().to_string().contains("options::reduce"), "{wrong}");
        }
    }
}
