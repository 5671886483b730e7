use super::*;
use crate::catalog::{Dict, Dtype, MeshId, Sharding, Value};
use crate::layout::parse_placements;

/// Returns the layout file that `inspect --layout` prints for a model of plain tensors of the shape 7 x 10 on the mesh
/// `h=2,w=3`. Each tensor is given by its name, placements and split rules.
fn printed(tensors: &[(&str, &str, &[&str])]) -> String {
    let mesh = DeviceMesh::parse("h=2,w=3").unwrap();
    let mut catalog = Catalog { meshes: vec![mesh.clone()], ..Catalog::empty() };
    let mut entries = Vec::new();
    for (name, list, splits) in tensors {
        let shape = [7, 10].as_slice().into();
        let specs = parse_placements(list).unwrap();
        let shared = SharedTensor {
            placements: specs.iter().map(|spec| spec.resolve(2).unwrap()).collect(),
            splits: splits.iter().map(|split| split.parse().unwrap()).collect(),
            slice: None,
        };
        let sharding = Some(Box::new(Sharding { mesh: MeshId(0), shared })).filter(|_| *list != "R,R");
        let entry =
            TensorEntry { class: Class::Tensor, sharding, ..TensorEntry::new((*name).into(), Dtype::F32, shape) };
        entries.push((Value::Str((*name).into()), Value::Tensor(catalog.push_tensor(entry))));
    }
    catalog.state = Value::Dict(Dict { entries, ..Dict::default() });
    toml(&file::document(&of_tensors(&catalog, Format::TorchRanks, mesh).unwrap()))
}

#[test]
fn most_frequent_split_becomes_the_split_of_the_layout() {
    let makani: &[&str] = &["makani", "makani"];
    let text = printed(&[
        ("layers.0.w", "S(0),S(1)", makani),
        ("layers.1.w", "S(0),S(1)", makani),
        ("layers.0.v", "R,S(0)", makani),
        ("layers.1.v", "R,S(0)", makani),
        ("chunks", "S(0),R", &[]),
        ("a{b}*", "S(1),R", &["3+7", "chunk"]),
        ("layers.0.u", "S(0),S(1)", &["balanced", "makani"]),
        ("layers.1.u", "S(0),S(1)", makani),
    ]);
    let expected = r#"mesh = "h=2,w=3"
placements = "S(0),S(1)"
split = "makani"

[[rules]]
tensors = "layers.*.v"
placements = "R,S(0)"

[[rules]]
tensors = "chunks"
placements = "S(0),R"
split = "chunk"

[[rules]]
tensors = "a?b??"
placements = "S(1),R"
split = "3+7,chunk"

[[rules]]
tensors = "layers.0.u"
placements = "S(0),S(1)"
split = "balanced,makani"
"#;
    assert_eq!(text, expected);
}

#[test]
fn experts_of_a_layer_are_one_rule() {
    let lists = ["S(0),R", "S(1),R"];
    let names: Vec<(String, &str)> =
        (0..12).map(|at| (format!("layers.{}.experts.{}.w", at / 3, at % 3), lists[(at / 3) % 2])).collect();
    let tensors: Vec<(&str, &str, &[&str])> =
        names.iter().map(|(name, list)| (name.as_str(), *list, [].as_slice())).collect();
    let text = printed(&tensors);
    let patterns: Vec<&str> = text.lines().filter(|line| line.starts_with("tensors")).collect();
    assert_eq!(patterns, ["tensors = \"layers.1.experts.*.w\"", "tensors = \"layers.3.experts.*.w\""]);
}

#[test]
fn too_many_different_layouts_are_an_error() {
    assert!(check_size(64, 1 << 18).is_ok());
    assert!(check_size(65, 1 << 18).unwrap_err().to_string().contains("would take 65 rules"));
}

#[test]
fn chunk_splits_are_not_printed() {
    let chunks: &[&str] = &["chunk", "chunk"];
    let text = printed(&[("w", "S(0),S(1)", chunks), ("v", "S(0),S(1)", &[]), ("u", "S(1),R", chunks)]);
    let rule = "[[rules]]\ntensors = \"u\"\nplacements = \"S(1),R\"\n";
    assert_eq!(text, format!("mesh = \"h=2,w=3\"\nplacements = \"S(0),S(1)\"\n\n{rule}"));
}
