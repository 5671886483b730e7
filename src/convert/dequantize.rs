//! Decodes the quantised weights of an opened source, as [`MapOptions::dequantize`] says: reads the size of blocks from the
//! model's configuration, and leaves the quantisation out of the configuration of the result.

use std::path::Path;

use serde_json::Value as Json;

use super::model_config::{CONFIG, Configuration, MAX_BYTES};
use crate::catalog::{Dtype, OutputFile, Reservation};
use crate::error::{Error, Result};
use crate::exec::sidecar_files::SidecarFile;
use crate::format::Checkpoint;
use crate::quantity::count;
use crate::select::dequantized::{self, Dequantized, Encoding};

/// The key of a configuration that describes how weights are quantised.
const KEY: &str = "quantization_config";

/// Decodes the quantised weights of a checkpoint to `dtype`. Returns what was decoded, and a note for the user.
///
/// # Errors
/// `Usage` for another dtype than bf16 and f32, and for a configuration with another method; errors of
/// [`dequantized::dequantize`].
pub fn apply(checkpoint: &mut Checkpoint, dtype: Dtype, config: &Configuration) -> Result<(Dequantized, String)> {
    if !matches!(dtype, Dtype::Bf16 | Dtype::F32) {
        return Err(Error::usage(
            format!("options::dequantize {dtype}: expected bf16 or f32"),
            "dequantise to bf16 or f32, and cast with options::dtype",
        ));
    }
    let found = dequantized::dequantize(&mut checkpoint.catalog, &mut checkpoint.files, dtype, block_size(config)?)?;
    let of = |(encoding, number): &(Encoding, usize)| {
        let name = match encoding {
            Encoding::ScaledBlocks => "FP8 with the scales of blocks",
            Encoding::Mxfp4 => "MXFP4",
        };
        format!("{} of {name}", count(*number, "tensor"))
    };
    let counts: Vec<String> = found.counts.iter().map(of).collect();
    let note = format!("dequantised to {dtype}: {}", counts.join(", "));
    Ok((found, note))
}

/// Returns the numbers of rows and columns of an FP8 block, if a configuration gives them.
fn block_size(config: &Configuration) -> Result<Option<[u64; 2]>> {
    let Some(size) = config.get(KEY).and_then(|quantization| quantization.get("weight_block_size")) else {
        return Ok(None);
    };
    let sizes = size.as_array().and_then(|sizes| sizes.iter().map(Json::as_u64).collect::<Option<Vec<_>>>());
    match sizes.as_deref() {
        Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok(Some([rows, columns])),
        _ if size.is_null() => Ok(None),
        _ => Err(Error::usage(
            format!("{}: {KEY}.weight_block_size: expected two numbers of at least 1, found {size}", config.name()),
            "correct the configuration, or give another with options::config",
        )),
    }
}

/// Moves the configuration of the model from the copied files to the written files, without the description of the
/// quantisation. Returns a note, or `None` if no configuration is copied or it describes no quantisation.
///
/// # Errors
/// `Io` if the configuration cannot be read.
pub fn rewrite_config(carried: &mut Vec<SidecarFile>, reservation: &mut Reservation) -> Result<Option<String>> {
    let is_config = |file: &SidecarFile| file.to == Path::new(CONFIG) && file.len < MAX_BYTES;
    let Some(index) = carried.iter().position(is_config) else { return Ok(None) };
    let text = std::fs::read(&carried[index].read_path).map_err(Error::io("read", &carried[index].from))?;
    let Ok(Json::Object(mut config)) = serde_json::from_slice(&text) else { return Ok(None) };
    if config.remove(KEY).is_none() {
        return Ok(None);
    }
    let mut text = serde_json::to_vec_pretty(&config).expect("an object of JSON");
    text.push(b'\n');
    let mut file = OutputFile::new(carried.remove(index).to);
    file.push_header(text);
    reservation.files.push(file);
    Ok(Some(format!("{CONFIG} is written without {KEY}")))
}
