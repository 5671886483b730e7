//! Decodes the quantised weights of an opened source, as
//! [`MapOptions::dequantize`](super::options::MapOptions::dequantize) says: reads the size of blocks from the model's configuration,
//! and leaves the quantisation out of the configuration of the result.

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
/// The values of `quant_method` that can be decoded.
const METHODS: [&str; 2] = ["fp8", "mxfp4"];

/// Decodes the quantised weights of a checkpoint to `dtype`. Returns what was decoded, and a note for the user.
///
/// # Errors
/// `Usage` for another dtype than bf16 and f32; `Unsupported` for a configuration with another method; errors of
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
    let Some(quantization) = config.get(KEY) else { return Ok(None) };
    let method = quantization.get("quant_method").and_then(Json::as_str);
    if let Some(method) = method.filter(|method| !METHODS.contains(method)) {
        return Err(Error::unsupported(
            format!("{}: the weights are quantised with {method}, which dtshard cannot decode", config.name()),
            format!("options::dequantize decodes {}", METHODS.join(" and ")),
        ));
    }
    let Some(size) = quantization.get("weight_block_size") else { return Ok(None) };
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
/// quantisation and with the dtype `dtype`. Returns a note, or `None` if no configuration is copied or it describes no
/// quantisation.
///
/// # Errors
/// `Io` if the configuration cannot be read; `Usage` if it is not JSON.
pub fn rewrite_config(
    carried: &mut Vec<SidecarFile>,
    reservation: &mut Reservation,
    dtype: Dtype,
) -> Result<Option<String>> {
    let is_config = |file: &SidecarFile| file.to == Path::new(CONFIG);
    let Some(index) = carried.iter().position(is_config) else { return Ok(None) };
    let file = &carried[index];
    let config = if file.len < MAX_BYTES {
        let text = std::fs::read(&file.read_path).map_err(Error::io("read", &file.from))?;
        serde_json::from_slice(&text).ok()
    } else {
        None
    };
    let Some(Json::Object(mut config)) = config else {
        return Err(Error::usage(
            format!("{}: expected a JSON object of less than 1 MiB, to remove {KEY} from it", file.from.display()),
            "correct the file, or copy other files with options::assets",
        ));
    };
    let mut is_changed = config.remove(KEY).is_some();
    for key in ["text_config", "thinker_config"] {
        is_changed |= config.get_mut(key).and_then(Json::as_object_mut).is_some_and(|own| own.remove(KEY).is_some());
    }
    if !is_changed {
        return Ok(None);
    }
    let mut with_dtype = String::new();
    for key in ["dtype", "torch_dtype"] {
        if let Some(own) = config.get_mut(key).filter(|own| own.as_str() != Some(dtype.torch_name())) {
            *own = dtype.torch_name().into();
            with_dtype = format!(", and with {key} {}", dtype.torch_name());
        }
    }
    let mut text = serde_json::to_vec_pretty(&config).expect("an object of JSON");
    text.push(b'\n');
    let mut file = OutputFile::new(carried.remove(index).to);
    file.push_header(text);
    reservation.files.push(file);
    Ok(Some(format!("{CONFIG} is written without {KEY}{with_dtype}")))
}
