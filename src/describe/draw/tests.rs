use super::*;
use crate::layout::{DeviceMesh, local_shard, parse_placements};

const ROOM: PictureSize = PictureSize { columns: 100, lines: 24 };

fn text(lines: &[Vec<Span>]) -> String {
    let line = |spans: &Vec<Span>| spans.iter().map(|span| span.text.as_str()).collect::<String>();
    lines.iter().map(|spans| line(spans).trim_end().to_owned() + "\n").collect()
}

/// Returns the tile of every rank of a mesh, for a tensor with these placements.
fn chunks(shape: &[u64], mesh: &str, placements: &str) -> Vec<(ChunkHolder, Tile)> {
    let mesh = DeviceMesh::parse(mesh).unwrap();
    let specs = parse_placements(placements).unwrap();
    let placements: Vec<_> = specs.iter().map(|spec| spec.resolve(shape.len()).unwrap()).collect();
    let tile = |at: &[u64]| local_shard(shape, mesh.shape(), &placements, at).unwrap();
    mesh.coordinates().map(|(rank, at)| (ChunkHolder::Rank(rank), tile(&at))).collect()
}

fn drawing(shape: &[u64], mesh: &str, placements: &str) -> String {
    text(&draw(shape, &chunks(shape, mesh, placements), ROOM))
}

#[track_caller]
fn check(found: String, expected: &str) {
    assert!(found == expected.strip_prefix('\n').unwrap(), "\n{found}");
}

fn boxed(offsets: &[u64], sizes: &[u64]) -> Tile {
    Tile::from_region(&crate::layout::Region::new(offsets, sizes))
}

fn uneven() -> Vec<(ChunkHolder, Tile)> {
    let rank = |rank| ChunkHolder::Rank(Rank(rank));
    vec![(rank(0), boxed(&[0, 0], &[999_999, 2])), (rank(1), boxed(&[999_999, 0], &[1, 2]))]
}

fn in_files() -> Vec<(ChunkHolder, Tile)> {
    let file = |name: &str| ChunkHolder::File(name.into());
    vec![
        (file("model-00001-of-00002.safetensors"), boxed(&[0, 0], &[2, 2])),
        (file("model-00002-of-00002.safetensors"), boxed(&[2, 0], &[2, 2])),
    ]
}

/// Returns the chunks of a 6 x 6 tensor. Rank 0 holds the upper rows, and the left columns of the lower rows; rank 1
/// holds the rest, which is the lower right corner.
fn corner() -> Vec<(ChunkHolder, Tile)> {
    let rank = |rank| ChunkHolder::Rank(Rank(rank));
    vec![(rank(0), boxed(&[0, 0], &[3, 6])), (rank(0), boxed(&[3, 0], &[3, 2])), (rank(1), boxed(&[3, 2], &[3, 4]))]
}

#[test]
fn rows_of_uneven_length() {
    let expected = "
    0            3
  0 ┌────────────┐
    │            │
    │     0      │
    │            │
  3 ├────────────┤
    │            │
    │     1      │
    │            │
  6 ├────────────┤
    │            │
    │     2      │
    │            │
  9 ├────────────┤
    │     3      │
 10 └────────────┘
";
    check(drawing(&[10, 3], "dp=4", "S(0)"), expected);
}

#[test]
fn columns_of_uneven_length() {
    let expected = "
   0            3            6            9    10
 0 ┌────────────┬────────────┬────────────┬────┐
   │            │            │            │    │
   │     0      │     1      │     2      │ 3  │
   │            │            │            │    │
   │            │            │            │    │
 4 └────────────┴────────────┴────────────┴────┘
";
    check(drawing(&[4, 10], "dp=4", "S(1)"), expected);
}

#[test]
fn two_sharded_dims_are_a_grid() {
    let expected = "
   0                    5                9
 0 ┌────────────────────┬────────────────┐
   │                    │                │
   │         0          │       1        │
   │                    │                │
 3 ├────────────────────┼────────────────┤
   │         2          │       3        │
   │                    │                │
 5 └────────────────────┴────────────────┘
";
    check(drawing(&[5, 9], "dp=2,tp=2", "S(0),S(1)"), expected);
}

#[test]
fn strided_shards_are_stripes() {
    let expected = "
   0                        6
 0 ┌────────────────────────┐
   │           0            │
   │                        │
 2 ├────────────────────────┤
   │           2            │
   │                        │
 4 ├────────────────────────┤
   │           1            │
   │                        │
 6 ├────────────────────────┤
   │           3            │
   │                        │
 8 └────────────────────────┘
";
    check(drawing(&[8, 6], "dp=2,tp=2", "_S(0,2),S(0)"), expected);
}

#[test]
fn strided_shards_of_one_rank_are_several_boxes() {
    let expected = "
   0        2        4        6        8        10       12
 0 ┌────────┬────────┬────────┬────────┬────────┬────────┐
   │        │        │        │        │        │        │
   │   0    │   1    │   0    │   1    │   0    │   1    │
   │        │        │        │        │        │        │
   │        │        │        │        │        │        │
 4 └────────┴────────┴────────┴────────┴────────┴────────┘
";
    check(drawing(&[4, 12], "tp=2", "_S(1,3)"), expected);
}

#[test]
fn replicas_share_a_box() {
    let expected = "
   0                4
 0 ┌────────────────┐
   │      0,3       │
   │                │
 2 ├────────────────┤
   │      1,4       │
   │                │
 4 ├────────────────┤
   │      2,5       │
   │                │
 6 └────────────────┘
";
    check(drawing(&[6, 4], "r=2,s=3", "R,S(0)"), expected);
}

#[test]
fn replicated_tensor_is_one_box() {
    let expected = "
   0            3
 0 ┌────────────┐
   │    0-3     │
   │            │
 2 └────────────┘
";
    check(drawing(&[2, 3], "dp=4", "R"), expected);
}

#[test]
fn one_dim_is_a_bar() {
    let expected = "
 0            3            6            9    10
 ┌────────────┬────────────┬────────────┬────┐
 │     0      │     1      │     2      │ 3  │
 └────────────┴────────────┴────────────┴────┘
";
    check(drawing(&[10], "dp=4", "S(0)"), expected);
}

#[test]
fn scalar_is_one_cell() {
    let expected = "
 ┌─────┐
 │ 0,1 │
 └─────┘
";
    check(drawing(&[], "dp=2", "R"), expected);
}

#[test]
fn uncut_third_dim_is_named_in_the_legend() {
    let expected = "
rows are dim 0, columns are dim 2
dim 1 (6) is whole everywhere
   0                4                8
 0 ┌────────────────┬────────────────┐
   │       0        │       1        │
   │                │                │
 2 ├────────────────┼────────────────┤
   │       2        │       3        │
   │                │                │
 4 └────────────────┴────────────────┘
";
    check(drawing(&[4, 6, 8], "dp=2,tp=2", "S(0),S(2)"), expected);
}

#[test]
fn cut_third_dim_is_collapsed() {
    let expected = "
rows are dim 0, columns are dim 1
dim 2 (4) is cut as well, but not drawn: a box names all holders of any part of it
   0        2        4
 0 ┌────────┬────────┐
   │  0,1   │  2,3   │
   │        │        │
 2 ├────────┼────────┤
   │  4,5   │  6,7   │
   │        │        │
 4 └────────┴────────┘
";
    check(drawing(&[4, 4, 4], "a=2,b=2,c=2", "S(0),S(1),S(2)"), expected);
}

#[test]
fn ranks_without_elements_are_listed() {
    let expected = "
   0            3
 0 ┌────────────┐
   │     0      │
 1 ├────────────┤
   │     1      │
 2 └────────────┘
ranks 2, 3 hold nothing
";
    check(drawing(&[2, 3], "dp=4", "S(0)"), expected);
}

#[test]
fn tensor_without_elements_has_no_picture() {
    let expected = "
no elements
ranks 0, 1 hold nothing
";
    check(drawing(&[0, 3], "dp=2", "S(0)"), expected);
}

#[test]
fn many_rows_are_drawn_without_lines_between_them() {
    let expected = "
      0                                        64
      ┌────────────────────────────────────────┐
    0 │                   0                    │
  256 │                   1                    │
  512 │                   2                    │
  768 │                   3                    │
 1024 │                   4                    │
 1280 │                   5                    │
 1536 │                   6                    │
 1792 │                   7                    │
 2048 │                   8                    │
 2304 │                   9                    │
 2560 │                   10                   │
 2816 │                   11                   │
 3072 │                   12                   │
 3328 │                   13                   │
 3584 │                   14                   │
 3840 │                   15                   │
 4096 └────────────────────────────────────────┘
";
    check(drawing(&[4096, 64], "dp=16", "S(0)"), expected);
}

#[test]
fn very_uneven_rows_get_at_least_one_line_each() {
    let expected = "
         0        2
       0 ┌────────┐
         │        │
         │        │
         │        │
         │        │
         │        │
         │        │
         │        │
         │        │
         │        │
         │   0    │
         │        │
         │        │
         │        │
         │        │
         │        │
         │        │
         │        │
         │        │
         │        │
         │        │
  999999 ├────────┤
         │   1    │
 1000000 └────────┘
";
    check(text(&draw(&[1_000_000, 2], &uneven(), ROOM)), expected);
}

#[test]
fn long_file_names_become_letters() {
    let expected = "
   0        2
 0 ┌────────┐
   │   A    │
   │        │
 2 ├────────┤
   │   B    │
   │        │
 4 └────────┘
A  model-00001-of-00002.safetensors
B  model-00002-of-00002.safetensors
";
    check(text(&draw(&[4, 2], &in_files(), ROOM)), expected);
}

#[test]
fn missing_chunks_are_an_empty_box() {
    let expected = "
   0                4
 0 ┌────────────────┐
   │                │
   │                │
 2 ├────────────────┤
   │       1        │
   │                │
 4 ├────────────────┤
   │                │
   │                │
 6 └────────────────┘
an empty box: in none of the files that were read
";
    check(text(&draw(&[6, 4], &chunks(&[6, 4], "dp=3", "S(0)")[1..2], ROOM)), expected);
}

#[test]
fn box_that_is_not_a_rectangle_is_drawn() {
    let expected = "
   0        2                6
 0 ┌─────────────────────────┐
   │                         │
   │            0            │
   │                         │
 3 │        ┌────────────────┤
   │        │                │
   │        │       1        │
   │        │                │
 6 └────────┴────────────────┘
";
    check(text(&draw(&[6, 6], &corner(), ROOM)), expected);
}

#[test]
fn many_ranks_are_a_list() {
    let found = drawing(&[4096, 16], "dp=128,tp=2", "_S(0,2),S(0)");
    assert_eq!(found.lines().count(), 256);
    assert!(
        found.starts_with("rank 0    [0:16, 0:16]\nrank 1    [2048:2064, 0:16]\nrank 2    [16:32, 0:16]\n"),
        "{found}"
    );
    let found = drawing(&[4096], "dp=2", "_S(0,1024)");
    assert!(found.starts_with("rank 0  [0:2+4:6+8:10+12:14+16:18+20:22+24:26+28:30+... (1024 in all)]\n"), "{found}");
}

#[test]
fn picture_never_exceeds_its_size() {
    let chunks = chunks(&[64, 64], "dp=4,tp=4", "S(0),S(1)");
    for columns in 0..120 {
        for lines in [0, 3, 6, 12, 24] {
            let found = text(&draw(&[64, 64], &chunks, PictureSize { columns, lines }));
            let is_list = found.starts_with("rank 0 ");
            let width = found.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(is_list || width <= columns, "{columns} x {lines}:\n{found}");
            let pictured = found.lines().filter(|line| line.contains(['│', '─'])).count();
            assert!(is_list || pictured <= lines, "{columns} x {lines}:\n{found}");
            assert!(!is_list || columns < 36 || lines < 6, "{columns} x {lines}");
        }
    }
}

#[test]
fn rank_has_the_same_colour_in_every_picture() {
    let grounds = |shape: &[u64], mesh, placements| {
        let lines = draw(shape, &chunks(shape, mesh, placements), ROOM);
        let spans = lines.into_iter().flatten().filter_map(|span| Some((span.text.trim().to_owned(), span.ground?)));
        spans.filter(|(name, _)| !name.is_empty()).collect::<BTreeMap<_, _>>()
    };
    let grid = grounds(&[8, 8], "dp=2,tp=2", "S(0),S(1)");
    assert_eq!(grid.len(), 4);
    assert_eq!(grid, grounds(&[8], "dp=4", "S(0)"));
    assert_eq!(grid.values().collect::<BTreeSet<_>>().len(), 4);
}

#[test]
fn huge_shapes_do_not_overflow() {
    let huge = [u64::MAX, u64::MAX];
    assert!(!draw(&huge, &[(ChunkHolder::Rank(Rank(0)), boxed(&[0, 0], &[1 << 40, 1]))], ROOM).is_empty());
    assert_eq!(letters(1) + &letters(26) + &letters(27) + &letters(703), "AZAAAAA");
}
