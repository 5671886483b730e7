use super::*;
use crate::layout::Dims;

fn tile(offsets: &[u64], sizes: &[u64]) -> Tile {
    Tile::from_region(&Region::new(offsets, sizes))
}

fn region(offsets: &[u64], sizes: &[u64]) -> Region {
    Region::new(offsets, sizes)
}

fn grid(rows: u64, columns: u64) -> Vec<Tile> {
    let cells = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    cells.map(|(row, column)| tile(&[3 * row, 2 * column], &[3, 2])).collect()
}

/// Five tiles that no straight line separates.
fn pinwheel() -> Vec<Tile> {
    vec![
        tile(&[0, 0], &[1, 2]),
        tile(&[0, 2], &[2, 1]),
        tile(&[2, 1], &[1, 2]),
        tile(&[1, 0], &[2, 1]),
        tile(&[1, 1], &[1, 1]),
    ]
}

fn error(shape: &[u64], tiles: &[Tile]) -> CoverError {
    Cover::prove(shape, tiles).unwrap_err()
}

#[test]
fn scalar_needs_exactly_one_tile() {
    let scalar = tile(&[], &[]);
    let cover = Cover::prove(&[], std::slice::from_ref(&scalar)).unwrap();
    assert_eq!(cover.overlapping(&scalar).collect::<Vec<_>>(), [0]);
    let region = Region::whole(&[]);
    assert_eq!(error(&[], &[]), CoverError::Gap { region: region.clone() });
    let twice = [scalar.clone(), scalar];
    assert_eq!(error(&[], &twice), CoverError::Overlap { first: 0, second: 1, region });
}

#[test]
fn tensor_without_elements_needs_no_tiles() {
    let empty = tile(&[7, 0], &[0, 0]);
    assert!(Cover::prove(&[3, 0], &[]).is_ok());
    let cover = Cover::prove(&[3, 0], &[empty.clone(), empty.clone()]).unwrap();
    assert_eq!(cover.overlapping(&empty).count(), 0);
    assert!(matches!(error(&[3, 0], &[tile(&[0, 0], &[3, 1])]), CoverError::OutOfBounds { tile: 0, .. }));
}

#[test]
fn bounds_and_dims_are_checked_first() {
    let beyond = error(&[4], &[tile(&[0], &[4]), tile(&[3], &[2])]);
    assert_eq!(beyond, CoverError::OutOfBounds { tile: 1, region: region(&[3], &[2]) });
    let flat = error(&[4, 4], &[tile(&[0], &[4])]);
    assert_eq!(flat, CoverError::Ndim { tile: 0, expected: 2, found: 1 });
    assert_eq!(flat.to_string(), "tile 0: expected 2 dims, found 1");
}

#[test]
fn huge_numbers_are_errors() {
    const MAX: u64 = u64::MAX;
    let huge = tile(&[MAX - 1, MAX], &[MAX, MAX]);
    assert!(Cover::prove(&[4, 4], &[huge.clone(), tile(&[0, 0], &[4, 4])]).is_ok(), "it saturates to nothing");
    assert!(matches!(error(&[4], &[tile(&[1], &[MAX])]), CoverError::OutOfBounds { .. }));
    assert!(matches!(error(&[MAX, MAX], &[tile(&[0, 0], &[MAX, MAX])]), CoverError::Gap { .. }));
    assert!(Cover::prove(&[MAX], &[tile(&[5], &[MAX - 5]), tile(&[0], &[5])]).is_ok());
    assert_eq!(error(&[MAX], &[tile(&[0], &[5])]), CoverError::Gap { region: region(&[5], &[MAX - 5]) });
    let uneven = [tile(&[0, 0], &[MAX / 4, 3]), tile(&[MAX / 4 - 1, 1], &[9, 1])];
    assert!(matches!(error(&[MAX / 4 + 8, 3], &uneven), CoverError::Overlap { .. }));
}

#[test]
fn gap_in_a_grid_is_named() {
    let mut tiles = grid(3, 4);
    assert!(matches!(Cover::prove(&[9, 8], &tiles).unwrap().index, CoverIndex::Grid(_)));
    tiles.remove(6);
    assert_eq!(error(&[9, 8], &tiles), CoverError::Gap { region: region(&[3, 4], &[3, 2]) });
    tiles.drain(1..4);
    assert_eq!(error(&[9, 8], &tiles), CoverError::Gap { region: region(&[0, 2], &[3, 6]) });
    assert_eq!(error(&[9, 8], &[]), CoverError::Gap { region: Region::whole(&[9, 8]) });
    assert_eq!(error(&[9, 9], &grid(3, 4)), CoverError::Gap { region: region(&[0, 8], &[9, 1]) });
}

#[test]
fn overlap_names_both_tiles_and_the_region() {
    let mut tiles = grid(3, 4);
    tiles.push(tiles[5].clone());
    let region = region(&[3, 2], &[3, 2]);
    assert_eq!(error(&[9, 8], &tiles), CoverError::Overlap { first: 5, second: 12, region });
    tiles.pop();
    tiles[5] = tile(&[3, 2], &[4, 2]);
    let region = Region::new(Dims::from_slice(&[6, 2]), Dims::from_slice(&[1, 2]));
    assert_eq!(error(&[9, 8], &tiles), CoverError::Overlap { first: 5, second: 9, region });
}

#[test]
fn pinwheel_is_one_leaf() {
    let mut tiles = pinwheel();
    let cover = Cover::prove(&[3, 3], &tiles).unwrap();
    assert!(matches!(cover.index, CoverIndex::Slabs(_)));
    assert_eq!(cover.overlapping(&tile(&[0, 0], &[2, 2])).collect::<Vec<_>>(), [0, 3, 4]);
    tiles.pop();
    assert_eq!(error(&[3, 3], &tiles), CoverError::Gap { region: region(&[1, 1], &[1, 1]) });
}

#[test]
fn interleaved_tiles_are_a_grid() {
    let stripes = |first: u64| Intervals::progression(first, 10, 1_000, 1);
    let tiles: Vec<Tile> = (0..10).map(|first| Tile::new([stripes(first), Intervals::full(3)])).collect();
    let cover = Cover::prove(&[10_000, 3], &tiles).unwrap();
    assert!(matches!(cover.index, CoverIndex::Grid(_)));
    assert_eq!(cover.overlapping(&tile(&[17, 0], &[2, 1])).collect::<Vec<_>>(), [7, 8]);
    assert_eq!(cover.overlapping(&tiles[4]).collect::<Vec<_>>(), [4]);
    assert_eq!(error(&[10_000, 3], &tiles[1..]), CoverError::Gap { region: region(&[0, 0], &[1, 3]) });
}

#[test]
fn deep_staircase_does_not_overflow_the_stack() {
    // Each step removes one row and one column, so the slabs are nested thousands deep.
    let n = 2_000;
    let steps = (0..n).flat_map(|i| [tile(&[i, i], &[1, n - i]), tile(&[i + 1, i], &[n - i - 1, 1])]);
    let tiles: Vec<Tile> = steps.collect();
    let cover = Cover::prove(&[n, n], &tiles).unwrap();
    assert_eq!(cover.overlapping(&tile(&[n - 1, n - 1], &[1, 1])).count(), 1);
}

#[test]
fn large_covers_are_not_quadratic() {
    // There are 10^10 pairs of these tiles.
    let pieces: Vec<Tile> = (0..100_000).map(|i| tile(&[7 * i], &[7])).collect();
    assert!(Cover::prove(&[700_000], &pieces).is_ok());
    let mut cells = grid(128, 128);
    let cover = Cover::prove(&[384, 256], &cells).unwrap();
    assert_eq!(cover.overlapping(&tile(&[2, 1], &[2, 2])).collect::<Vec<_>>(), [0, 1, 128, 129]);
    // Splitting one tile in two makes the grid irregular.
    cells[77] = tile(&[0, 154], &[1, 2]);
    cells.push(tile(&[1, 154], &[2, 2]));
    let cover = Cover::prove(&[384, 256], &cells).unwrap();
    assert!(matches!(cover.index, CoverIndex::Slabs(_)));
    assert_eq!(cover.overlapping(&tile(&[0, 153], &[3, 2])).collect::<Vec<_>>(), [76, 77, 16_384]);
}
