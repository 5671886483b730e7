//! What every rank's file is made of: the storages, and the tensors that are views of them.
//!
//! Counts elements. A storage has the same key on all ranks, and whatever a rank holds of it follows from the number of
//! the rank's shard.
//!
//! Source: `FlatParamHandle.flatten_tensors`, `_use_sharded_views` in `torch/distributed/fsdp/_flat_param.py`.

use std::collections::HashMap;
use std::ops::Range;

use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit};
use crate::catalog::{Catalog, ChunkTable, Dtype, Fqn, TensorId, Value};
use crate::error::{Error, Result};
use crate::layout::flat::FlatParameter;

/// A parameter of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParameterIndex {
    pub unit: usize,
    pub param: usize,
}

/// A tensor in the tree.
#[derive(Clone, Copy, Debug)]
pub struct TreeTensor {
    pub storage: usize,
    pub role: TensorRole,
}

#[derive(Clone, Copy, Debug)]
pub enum TensorRole {
    /// All of its storage, on every rank.
    Whole,
    /// All of its storage, on ranks that hold something of the parameter.
    WithParameter(ParameterIndex),
    /// The flat parameter.
    Flat,
    /// A parameter within the shard of its unit; `empty` is the storage where nothing of it is there.
    View { at: ParameterIndex, empty: usize },
    /// State of one parameter, which is left out where nothing of that is there.
    Slice(ParameterIndex),
    /// The gradient of one parameter, of which only itself is left out.
    Gradient(ParameterIndex),
    /// State of a flat parameter, as long as that is in memory.
    State,
}

#[derive(Debug)]
pub struct PlannedStorage {
    pub dtype: Dtype,
    pub content: StorageContent,
}

#[derive(Debug)]
pub enum StorageContent {
    Nothing,
    Whole(TensorId),
    /// What a shard of a unit holds of tensors of its parameters, one each.
    Shard {
        unit: usize,
        tensors: Vec<TensorId>,
        padding: Padding,
    },
    /// The same of one parameter alone.
    Slice {
        at: ParameterIndex,
        tensor: TensorId,
    },
}

/// The value of elements that nobody reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// 42: PyTorch's `_construct_padding_tensor`.
    Parameter,
    Zero,
}

/// The storages and tensors of a target.
pub struct FlatPlan<'a> {
    pub source: &'a Catalog,
    pub layout: &'a FlatLayout,
    pub flats: Vec<FlatParameter>,
    pub items: Vec<TreeTensor>,
    pub storages: Vec<PlannedStorage>,
    /// The storages of tensors that are whole on every rank.
    whole: HashMap<TensorId, usize>,
    /// The dtype of each unit's parameters, once the model is planned.
    pub dtypes: Option<Vec<Dtype>>,
    /// Tensors of the source of which one is written: that one, and what must be equal to it.
    pub merged: Vec<(TensorId, TensorId)>,
    /// What the optimizer that was planned first numbers, group by group.
    pub numbered: Option<Vec<Vec<Fqn>>>,
}

/// Elements that 16 bytes hold at most.
const MAX_ALIGN: u64 = 16;

impl<'a> FlatPlan<'a> {
    pub fn new(source: &'a Catalog, layout: &'a FlatLayout) -> Result<Self> {
        for unit in &layout.units {
            let align = unit.align_numel().unwrap_or(1);
            if layout.use_orig_params && align > MAX_ALIGN {
                return Err(Error::unsupported(
                    format!("{}: align_numel is {align}", unit.describe()),
                    "PyTorch aligns parameters to 16 bytes, which are 16 elements at the most",
                ));
            }
            if let Some(FlatParam { fqn, .. }) = unit.params.iter().find(|param| param.shape.is_empty()) {
                return Err(Error::unsupported(
                    format!("{}: {fqn} has no dims", unit.describe()),
                    "FSDP1 wraps no scalar parameters; a buffer is no part of a flat layout",
                ));
            }
        }
        let flats = layout.units.iter().map(|unit| layout.flat(unit)).collect();
        Ok(Self {
            source,
            layout,
            flats,
            items: Vec::new(),
            storages: Vec::new(),
            whole: HashMap::new(),
            dtypes: None,
            merged: Vec::new(),
            numbered: None,
        })
    }

    /// The layout with nothing left to conclude.
    pub fn written_layout(&self) -> FlatLayout {
        let mut layout = self.layout.clone();
        for (index, unit) in layout.units.iter_mut().enumerate() {
            unit.align_numel = unit.align_numel().filter(|_| layout.use_orig_params);
            unit.dtype = self.dtypes.as_ref().map_or(unit.dtype, |dtypes| Some(dtypes[index]));
        }
        layout
    }

    pub fn unit(&self, at: ParameterIndex) -> &'a FlatUnit {
        &self.layout.units[at.unit]
    }

    pub fn param(&self, at: ParameterIndex) -> &'a FlatParam {
        &self.unit(at).params[at.param]
    }

    /// Whether ranks have parts of parameters; if not, each has all.
    pub fn is_sharded(&self) -> bool {
        self.layout.shard_group_size > 1
    }

    /// Where in the flat parameter of its unit lies what a shard holds of a parameter; empty where that is nothing.
    pub fn held(&self, at: ParameterIndex, shard: u64) -> Range<u64> {
        let flat = &self.flats[at.unit];
        let (param, shard) = (&flat.params()[at.param], flat.shard(shard));
        let start = param.start.max(shard.start);
        start..param.end.min(shard.end).max(start)
    }

    /// Whether the tensor is in the files of ranks that have this shard.
    pub fn is_there(&self, item: TreeTensor, shard: u64) -> bool {
        match item.role {
            TensorRole::WithParameter(at) | TensorRole::Slice(at) | TensorRole::Gradient(at) => {
                !self.held(at, shard).is_empty()
            }
            _ => true,
        }
    }

    /// Elements that a storage has on ranks with this shard.
    pub fn numel(&self, storage: usize, shard: u64) -> u64 {
        match &self.storages[storage].content {
            StorageContent::Nothing => 0,
            StorageContent::Whole(id) => self.source.tensor(*id).numel(),
            StorageContent::Shard { unit, .. } => self.flats[*unit].shard_len(),
            StorageContent::Slice { at, .. } => {
                let held = self.held(*at, shard);
                held.end - held.start
            }
        }
    }

    pub fn storage(&mut self, dtype: Dtype, content: StorageContent) -> usize {
        self.storages.push(PlannedStorage { dtype, content });
        self.storages.len() - 1
    }

    /// A tensor of the target, as it stands in the tree.
    pub fn item(&mut self, storage: usize, role: TensorRole) -> Value {
        Value::Tensor(self.item_id(storage, role))
    }

    fn item_id(&mut self, storage: usize, role: TensorRole) -> TensorId {
        let id = TensorId(u32::try_from(self.items.len()).expect("fewer than 2^32 tensors"));
        self.items.push(TreeTensor { storage, role });
        id
    }

    /// The storage of a tensor that is whole on every rank; however often it occurs, there is one.
    pub fn whole_storage(&mut self, id: TensorId) -> usize {
        if let Some(storage) = self.whole.get(&id) {
            return *storage;
        }
        let storage = self.storage(self.source.tensor(id).dtype, StorageContent::Whole(id));
        self.whole.insert(id, storage);
        storage
    }

    /// A value with its tensors whole on every rank.
    pub fn whole_value(&mut self, value: &Value) -> Value {
        let mut value = value.clone();
        value.map_tensors(&mut |id| {
            let storage = self.whole_storage(id);
            self.item_id(storage, TensorRole::Whole)
        });
        value
    }
}

impl PlannedStorage {
    /// The tensors whose data is in it, in the order in which that lies there.
    pub fn tensors(&self) -> Vec<TensorId> {
        match &self.content {
            StorageContent::Nothing => Vec::new(),
            StorageContent::Whole(tensor) | StorageContent::Slice { tensor, .. } => vec![*tensor],
            StorageContent::Shard { tensors, .. } => tensors.clone(),
        }
    }

    /// Without rows, a table for each of [`Storage::tensors`].
    pub fn chunk_tables(&self, source: &Catalog) -> Vec<ChunkTable> {
        self.tensors().iter().map(|id| ChunkTable::new(source.tensor(*id).shape.len())).collect()
    }
}

impl Padding {
    /// The bytes of one element; `None` where PyTorch pads no such tensors.
    pub fn element(self, dtype: Dtype) -> Option<Vec<u8>> {
        Some(match (self, dtype) {
            (Self::Zero, _) => vec![0; usize::try_from(dtype.itemsize()).expect("a few bytes")],
            (Self::Parameter, Dtype::F64) => 42_f64.to_le_bytes().to_vec(),
            (Self::Parameter, Dtype::F32) => 42_f32.to_le_bytes().to_vec(),
            // 1.3125 * 2^5.
            (Self::Parameter, Dtype::Bf16) => 0x4228_u16.to_le_bytes().to_vec(),
            (Self::Parameter, Dtype::F16) => 0x5140_u16.to_le_bytes().to_vec(),
            (Self::Parameter, _) => return None,
        })
    }
}
