//! Lists of weight maps, for the verb `maps`: the built-in maps with their conventions, and how well each map fits a checkpoint.

use serde_json::{Value as Json, json};

use super::table::align;
use crate::convert::weight_map::{Configuration, built_in_maps, sizes};
use crate::error::Result;
use crate::format::Checkpoint;
use crate::maps::{Fit, WeightMap, families};
use crate::select::mapped;

/// A list of weight maps as text and as JSON.
#[derive(Debug)]
pub struct MapListing {
    text: String,
    document: Json,
}

impl MapListing {
    /// Lists the built-in maps with their conventions, and the sizes that they take from the configuration of a model.
    ///
    /// # Errors
    /// Only if a built-in map is damaged, which a test excludes.
    pub fn all() -> Result<Self> {
        let maps = built_in_maps()?;
        let row = |map: &WeightMap| {
            let sizes: Vec<String> = map.sizes.iter().map(ToString::to_string).collect();
            [map.family.clone(), map.side_names().join(", "), sizes.join("; ")]
        };
        let text = align(["family", "sides", "sizes"], maps.iter().map(row).collect());
        let document = json!({ "families": maps.iter().map(document).collect::<Vec<_>>() });
        Ok(Self { text, document })
    }

    /// Lists the conventions of all built-in maps that have names of a checkpoint, the best fit first.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let names = mapped::model_names(&checkpoint.catalog);
        let config = Configuration::read(checkpoint, None)?;
        let mut fits: Vec<(String, String, Fit)> = Vec::new();
        let is_for = |map: &WeightMap| config.model_type().is_none_or(|model_type| map.is_for(model_type));
        for map in built_in_maps()?.into_iter().filter(is_for) {
            let sizes = sizes(&map, &[], &config)?;
            for (index, side) in map.sides.iter().enumerate() {
                let fit = map.fit(index, names.iter().map(String::as_str), &sizes);
                if fit.named > 0 {
                    fits.push((map.family.clone(), side.name.clone(), fit));
                }
            }
        }
        fits.sort_by_key(|(_, _, fit)| (fit.unmatched.len(), std::cmp::Reverse(fit.named)));
        let row = |(family, side, fit): &(String, String, Fit)| {
            let without = match fit.unmatched.first() {
                None => String::from("0"),
                Some(first) => format!("{}, such as {first}", fit.unmatched.len()),
            };
            [family.clone(), side.clone(), fit.named.to_string(), fit.open.to_string(), without]
        };
        let header = ["family", "side", "by a row", "by **", "without a row"];
        let text = if fits.is_empty() {
            format!("no map has names of this checkpoint ({} tensors of the model)\n", names.len())
        } else {
            align(header, fits.iter().map(row).collect())
        };
        let json_of = |(family, side, fit): &(String, String, Fit)| json!({ "family": family, "side": side, "named": fit.named, "open": fit.open, "without": fit.unmatched });
        let document = json!({ "tensors": names.len(), "fits": fits.iter().map(json_of).collect::<Vec<_>>() });
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

/// Returns the map file of a built-in model family, or `None` if there is no such family.
#[must_use]
pub fn map_file(family: &str) -> Option<&'static str> {
    families().iter().find(|known| known.name == family).map(|known| known.text)
}

fn document(map: &WeightMap) -> Json {
    let sides: Vec<Json> =
        map.sides.iter().map(|side| json!({ "name": side.name, "model_type": side.model_types })).collect();
    let sizes: serde_json::Map<String, Json> =
        map.sizes.iter().map(|rule| (rule.axis.to_string(), json!(rule.value.to_string()))).collect();
    json!({ "family": map.family, "sides": sides, "sizes": sizes })
}
