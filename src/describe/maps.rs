//! Lists of weight maps, for the verb `maps`: the built-in maps with their conventions, the rows of one map, and how well maps fit a
//! checkpoint.

use std::cmp::Reverse;
use std::path::Path;

use serde_json::{Value as Json, json};

use super::table::align;
use crate::convert::model_config::Configuration;
use crate::convert::weight_map::{built_in_maps, file_names, map_named, sizes};
use crate::error::{Error, Result};
use crate::format::Checkpoint;
use crate::maps::{Fit, Row, WeightMap, families, is_scale};
use crate::name_list::{FEW, short_list};
use crate::quantity::count;
use crate::select::mapped;
use crate::storage::lookup;

/// A list of weight maps as text and as JSON.
#[derive(Debug)]
pub struct MapListing {
    text: String,
    document: Json,
}

impl MapListing {
    /// Lists the built-in maps with their conventions, the values of `model_type` that they are for, and the sizes that they take from
    /// the configuration of a model.
    ///
    /// # Errors
    /// Only if a built-in map is damaged, which a test excludes.
    pub fn all() -> Result<Self> {
        let maps = built_in_maps()?;
        let document = json!({ "families": maps.iter().map(document).collect::<Vec<_>>() });
        Ok(Self { text: table(&maps), document })
    }

    /// Lists the sides, sizes and rows of a map file, as dtshard understands them.
    ///
    /// # Errors
    /// `Layout` with the line and the side for a file that is not a map; `Io`.
    pub fn of_map(path: &Path) -> Result<Self> {
        let map = known_map(path)?;
        let rows = map.rows.iter().flat_map(|row| cells(&map, row)).collect();
        let mut document = document(&map);
        document["rows"] = map.rows.iter().map(|row| row_document(&map, row)).collect();
        let (table, rows) = (table(&[map]), align(["line", "sides", "tensors"], rows));
        Ok(Self { text: format!("{table}\n{rows}"), document })
    }

    /// Lists the conventions of all built-in maps that have names of a checkpoint, the best fit first.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let names = mapped::model_names(&checkpoint.catalog);
        let config = Configuration::read(checkpoint, None)?;
        let files = file_names(checkpoint);
        let mut fits: Vec<(bool, (String, String, Fit))> = Vec::new();
        let is_for = |map: &WeightMap| config.model_type().is_none_or(|model_type| map.is_for(model_type));
        for map in built_in_maps()?.into_iter().filter(is_for) {
            let sizes = sizes(&map, &[], &config)?;
            for (index, side) in map.sides.iter().enumerate() {
                let fit = map.fit(index, names.iter().map(String::as_str), &sizes);
                if fit.named > 0 {
                    fits.push((side.is_published_in(&files), (map.family.clone(), side.name.clone(), fit)));
                }
            }
        }
        fits.sort_by_key(|(is_published, (_, _, fit))| (fit.unmatched.len(), Reverse(fit.named), !is_published));
        let fits: Vec<(String, String, Fit)> = fits.into_iter().map(|(_, fit)| fit).collect();
        let mut text = if fits.is_empty() {
            format!("no map has names of this checkpoint ({} tensors of the model)\n", names.len())
        } else {
            align(FIT_HEADER, fits.iter().map(fit_row).collect())
        };
        text += quantised_line(&names);
        let document = json!({ "tensors": names.len(), "fits": fits.iter().map(fit_document).collect::<Vec<_>>() });
        Ok(Self { text, document })
    }

    /// Lists how well the sides of one map fit a checkpoint, and for each side that fits by its names the sides that it can be
    /// converted to.
    pub(crate) fn of_map_and(path: &Path, checkpoint: &Checkpoint) -> Result<Self> {
        let map = known_map(path)?;
        let names = mapped::model_names(&checkpoint.catalog);
        let config = Configuration::read(checkpoint, None)?;
        let sizes = sizes(&map, &[], &config)?;
        let fit_of = |(index, name): (usize, &str)| {
            (map.family.clone(), name.to_owned(), map.fit(index, names.iter().map(String::as_str), &sizes))
        };
        let fits: Vec<(String, String, Fit)> = map.side_names().into_iter().enumerate().map(fit_of).collect();
        let mut text = align(FIT_HEADER, fits.iter().map(fit_row).collect());
        text += quantised_line(&names);
        let mut conversions = Vec::new();
        let is_source = |from: &usize| fits[*from].2.unmatched.is_empty() && fits[*from].2.named > 0;
        for from in (0..map.sides.len()).filter(is_source) {
            for to in (0..map.sides.len()).filter(|to| *to != from) {
                let [from_name, to_name] = [from, to].map(|side| map.sides[side].name.as_str());
                let result = mapped::check(&checkpoint.catalog, &map, [from, to], sizes.clone());
                let (fault, line) = match result {
                    Ok(mapping) => {
                        let made: usize = mapping.applications.iter().map(|applied| applied.targets.len()).sum();
                        (None, format!("fits, {} to {made}", count(names.len(), "tensor")))
                    }
                    Err(error) => (Some(error.to_string()), error.to_string()),
                };
                text += &format!("{from_name} to {to_name}: {line}\n");
                conversions.push(json!({ "from": from_name, "to": to_name, "fault": fault }));
            }
        }
        if conversions.is_empty() {
            let nearest = fits.iter().min_by_key(|(_, _, fit)| fit.unmatched.len());
            if let Some((_, side, fit)) = nearest {
                let without = short_list(&fit.unmatched, FEW);
                text += &format!("no side fits; names without a row on the side {side}: {without}\n");
            }
        }
        if let Some(model_type) = config.model_type().filter(|model_type| !map.is_for(model_type)) {
            let types = map.model_types().join(", ");
            text += &format!("the map is for models of the type {types}, and SRC has the model_type {model_type}\n");
        }
        let document = json!({
            "tensors": names.len(), "fits": fits.iter().map(fit_document).collect::<Vec<_>>(), "conversions": conversions,
        });
        Ok(Self { text, document })
    }

    /// Returns the list as a table.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the list as JSON.
    #[must_use]
    pub fn document(&self) -> &Json {
        &self.document
    }
}

/// Returns a line for models with quantised weights, whose names fit a map only after they are decoded.
fn quantised_line(names: &[String]) -> &'static str {
    if names.iter().any(|name| is_scale(name)) {
        "the weights are quantised: after they are decoded, a map without `**` rows may fit\n"
    } else {
        ""
    }
}

/// Returns the map file of a built-in model family, or `None` if there is no such family.
#[must_use]
pub fn map_file(family: &str) -> Option<&'static str> {
    families().iter().find(|known| known.name == family).map(|known| known.text)
}

/// Returns whether a path is that of a map file: a file with the suffix `.toml`, or `.json` if it is not the index of a checkpoint.
///
/// # Errors
/// `Io`.
pub fn is_map_file(path: &Path) -> Result<bool> {
    let suffix = path.extension().and_then(|suffix| suffix.to_str());
    let is_index =
        path.file_stem().is_some_and(|stem| Path::new(stem).extension().is_some_and(|inner| inner == "index"));
    Ok((suffix == Some("toml") || suffix == Some("json") && !is_index) && lookup::is_file(path)?)
}

/// Returns the map of a family or a file.
fn known_map(path: &Path) -> Result<WeightMap> {
    let name = path.to_string_lossy();
    map_named(&name)?.ok_or_else(|| {
        Error::usage(
            format!("{name}: expected a map family or a map file"),
            "give a built-in family or the path of a map file; `dtshard maps` lists the families",
        )
    })
}

/// Returns a table with a line for each map.
fn table(maps: &[WeightMap]) -> String {
    let row = |map: &WeightMap| {
        let sizes: Vec<String> = map.sizes.iter().map(ToString::to_string).collect();
        [map.family.clone(), map.side_names().join(", "), map.model_types().join(", "), sizes.join("; ")]
    };
    align(["family", "sides", "model_type", "sizes"], maps.iter().map(row).collect())
}

/// Returns a line for each cell of a row: the line of the file, the sides that have the cell, and its tensors.
fn cells(map: &WeightMap, row: &Row) -> Vec<[String; 3]> {
    let mut cells: Vec<[String; 3]> = Vec::new();
    for (side, name) in map.side_names().into_iter().enumerate().filter(|(side, _)| row.is_on(*side)) {
        let tensors: Vec<String> = row.cells[side].iter().map(ToString::to_string).collect();
        let add = if row.add[side] == 0.0 { String::new() } else { format!(" plus {}", row.add[side]) };
        let tensors = tensors.join(", ") + &add;
        match cells.iter_mut().find(|cell| cell[2] == tensors) {
            Some(cell) => cell[1] += &format!(", {name}"),
            None => cells.push([row.line.to_string(), name.to_owned(), tensors]),
        }
    }
    cells
}

fn row_document(map: &WeightMap, row: &Row) -> Json {
    let mut document = serde_json::Map::new();
    for (side, name) in map.side_names().into_iter().enumerate().filter(|(side, _)| row.is_on(*side)) {
        document.insert(name.to_owned(), row.cells[side].iter().map(ToString::to_string).collect());
    }
    json!({ "line": row.line, "cells": document })
}

const FIT_HEADER: [&str; 5] = ["family", "side", "by a row", "by **", "without a row"];

fn fit_row((family, side, fit): &(String, String, Fit)) -> [String; 5] {
    let without = match fit.unmatched.first() {
        None => String::from("0"),
        Some(first) => format!("{}, such as {first}", fit.unmatched.len()),
    };
    [family.clone(), side.clone(), fit.named.to_string(), fit.open.to_string(), without]
}

fn fit_document((family, side, fit): &(String, String, Fit)) -> Json {
    json!({ "family": family, "side": side, "named": fit.named, "open": fit.open, "without": fit.unmatched })
}

fn document(map: &WeightMap) -> Json {
    let sides: Vec<Json> =
        map.sides.iter().map(|side| json!({ "name": side.name, "model_type": side.model_types })).collect();
    let sizes: serde_json::Map<String, Json> =
        map.sizes.iter().map(|rule| (rule.axis.to_string(), json!(rule.value.to_string()))).collect();
    json!({ "family": map.family, "sides": sides, "sizes": sizes })
}
