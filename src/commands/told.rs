//! What the command line says of how SRC lies, where its files do not: `--src-mesh` to `--reduce`.

use crate::cli::ToldArgs;
use crate::error::{Error, Result};
use crate::format::Told;
use crate::format::told::Reduce;
use crate::layout::{DeviceMesh, Rank, ReduceOp};

use super::placements;

/// `None` where nothing is said.
///
/// # Errors
/// `Layout` and `Usage` for what makes no sense by itself.
pub fn told(args: &ToldArgs, keep_names: bool) -> Result<Option<Told>> {
    let ToldArgs { src_mesh, src_mesh_ranks, src_placements, src_split, reduce } = args;
    let says_how = !src_placements.is_empty() || !reduce.is_empty();
    let given = [
        ("--src-mesh", src_mesh.is_some()),
        ("--src-mesh-ranks", !src_mesh_ranks.is_empty()),
        ("--src-split", src_split.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        None if !says_how => return Ok(None),
        Some((option, _)) if !says_how => {
            return Err(Error::usage(
                format!("{option} alone says nothing of how tensors lie"),
                "say it with --src-placements '**.w1=S(0)', a rule for each kind of tensor that ranks have parts of, or \
                 with --reduce",
            ));
        }
        _ => {}
    }
    let (rules, fallback) = placements::read("--src-placements", src_placements)?;
    let said = |list: &Vec<crate::layout::PlacementSpec>| {
        let list: Vec<String> = list.iter().map(ToString::to_string).collect();
        format!("--src-placements {}", list.join(","))
    };
    Ok(Some(Told {
        mesh: mesh(args)?,
        rules,
        fallback: fallback.map(|list| {
            let said = said(&list);
            (list, said)
        }),
        split: src_split.clone(),
        reduce: reduce.iter().map(|text| parse_reduce(text)).collect::<Result<_>>()?,
        keep_names,
    }))
}

fn mesh(args: &ToldArgs) -> Result<Option<DeviceMesh>> {
    let mesh = args.src_mesh.as_deref().map(DeviceMesh::parse).transpose()?;
    if args.src_mesh_ranks.is_empty() {
        return Ok(mesh);
    }
    let Some(mesh) = mesh else {
        return Err(Error::usage(
            "--src-mesh-ranks says which ranks a mesh has where, and there is no --src-mesh",
            "say both, such as --src-mesh dp=2,tp=2 --src-mesh-ranks 0,2,1,3",
        ));
    };
    let ranks = args.src_mesh_ranks.iter().map(|rank| Rank(*rank)).collect();
    Ok(Some(DeviceMesh::new(mesh.shape(), ranks, mesh.names().map(<[String]>::to_vec))?))
}

/// `dp,cp=avg`
fn parse_reduce(text: &str) -> Result<Reduce> {
    let (dims, op) = match text.split_once('=') {
        Some((dims, op)) => (dims, ReduceOp::from_name(op.trim())),
        None => (text, Some(ReduceOp::Sum)),
    };
    let dims: Vec<String> = dims.split(',').map(|dim| dim.trim().to_owned()).collect();
    match op {
        Some(op) if dims.iter().all(|dim| !dim.is_empty()) => Ok(Reduce { dims, op }),
        _ => Err(Error::usage(
            format!("--reduce {text}: expected names of mesh dims, and how they are reduced"),
            "such as --reduce dp, which sums, or --reduce dp,cp=avg; known are sum, avg, max, min and product",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dims_and_how_they_are_reduced() {
        let read = |text: &str| parse_reduce(text).map(|reduce| (reduce.dims.join("+"), reduce.op));
        assert_eq!(read("dp").unwrap(), ("dp".to_owned(), ReduceOp::Sum));
        assert_eq!(read("dp, cp=AVG").unwrap(), ("dp+cp".to_owned(), ReduceOp::Avg));
        for wrong in ["", "dp=mean", "dp,=sum", "=sum", "dp=sum=avg"] {
            assert!(read(wrong).unwrap_err().to_string().contains("--reduce"), "{wrong}");
        }
    }
}
