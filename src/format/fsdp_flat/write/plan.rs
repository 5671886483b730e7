//! The plan of an FSDP1 target: storages, and tensors that are views of these storages. All rank files have the same
//! plan.
//!
//! Ranges and lengths count elements. A storage has the same key on all ranks. The elements that a rank has of a
//! storage depend only on the index of the rank's shard.
//!
//! Source: `FlatParamHandle.flatten_tensors`, `_use_sharded_views` in `torch/distributed/fsdp/_flat_param.py`.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit, flat_module};
use crate::catalog::{Catalog, ChunkTable, Dtype, Fqn, TensorId, Value, state_dict};
use crate::error::{Error, Result};
use crate::layout::flat::FlatParameter;

/// The indices of a parameter in a layout: its unit, and its position in the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParameterIndex {
    pub unit: usize,
    pub param: usize,
}

/// A parameter that an optimizer updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrainedParameter {
    InUnit(ParameterIndex),
    /// A parameter outside all units, as an index of [`FlatPlan::outside`]. Every rank has the whole parameter and its
    /// whole state.
    Outside(usize),
}

/// A tensor in the planned state dict. Each tensor is a view of one storage.
#[derive(Clone, Copy, Debug)]
pub struct TreeTensor {
    pub storage: usize,
    pub role: TensorRole,
}

#[derive(Clone, Copy, Debug)]
/// The kind of a planned tensor. The kind determines which elements of the storage the tensor covers, and which ranks
/// have the tensor.
pub enum TensorRole {
    /// A tensor that covers its storage completely, and that every rank has.
    Whole,
    /// A tensor that covers its storage completely. Only a rank whose shard has elements of the parameter has the
    /// tensor.
    WithParameter(ParameterIndex),
    /// A flat parameter, of which each rank has its shard.
    Flat,
    /// A parameter that is a view of its unit's shard. On a rank whose shard has no element of the parameter, the
    /// tensor is a view of the storage `empty`.
    View { at: ParameterIndex, empty: usize },
    /// Optimizer state of one parameter. A rank whose shard has no element of the parameter does not have the tensor.
    Slice(ParameterIndex),
    /// The gradient of one parameter. A rank whose shard has no element of the parameter does not have this gradient,
    /// but has the other entries of the dict of gradients.
    Gradient(ParameterIndex),
    /// Optimizer state or the gradient of a flat parameter, with the length of the rank's shard, including padding.
    State,
}

#[derive(Debug)]
/// A storage in the rank files. The shard of a rank determines which elements of the storage the rank has.
pub struct PlannedStorage {
    pub dtype: Dtype,
    pub content: StorageContent,
}

#[derive(Debug)]
/// The content of a storage.
pub enum StorageContent {
    Nothing,
    Whole(TensorId),
    /// The rank's shard of a unit, filled from one source tensor for each parameter.
    Shard {
        unit: usize,
        tensors: Vec<TensorId>,
        padding: Padding,
    },
    /// The elements of one parameter that are in the rank's shard, filled from one source tensor.
    Slice {
        at: ParameterIndex,
        tensor: TensorId,
    },
}

/// The value of the padding elements in a storage. PyTorch never reads these elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// The value 42, as in PyTorch's `_construct_padding_tensor`.
    Parameter,
    Zero,
}

/// The planned storages and tensors of an FSDP1 target.
pub struct FlatPlan<'a> {
    pub source: &'a Catalog,
    pub layout: &'a FlatLayout,
    pub flat_params: Vec<FlatParameter>,
    /// The names of the model's tensors that are not parameters of the layout. The optimizer may update some of them.
    /// If the source has no model, the names come from the parameter groups in the layout.
    pub outside: Vec<Fqn>,
    pub tensors: Vec<TreeTensor>,
    pub storages: Vec<PlannedStorage>,
    /// The storage of each source tensor that all ranks have in full.
    replicated: HashMap<TensorId, usize>,
    /// The dtype of each unit's parameters; `None` until the model is planned.
    pub dtypes: Option<Vec<Dtype>>,
    /// Pairs of source tensors of which the target stores only the first. The second is not written, so its values must
    /// equal those of the first.
    pub merged: Vec<(TensorId, TensorId)>,
    /// The names of the parameters or flat parameters that the first planned optimizer updates, in the order of their
    /// parameter ids in the target, one list per parameter group; `None` until an optimizer is planned.
    pub numbered: Option<Vec<Vec<Fqn>>>,
}

/// The maximum alignment of parameters, in elements. PyTorch aligns parameters to 16 bytes, which are at most 16
/// elements.
const MAX_ALIGN: u64 = 16;

impl<'a> FlatPlan<'a> {
    /// Checks the alignments and shapes in the layout, and returns a plan without tensors.
    ///
    /// # Errors
    /// `Unsupported` for an alignment that PyTorch never uses, and for a scalar parameter.
    pub fn new(source: &'a Catalog, layout: &'a FlatLayout) -> Result<Self> {
        for unit in &layout.units {
            let align = unit.align_numel().unwrap_or(1);
            if layout.use_orig_params && align > MAX_ALIGN {
                return Err(Error::unsupported(
                    format!("{}: expected an align_numel of at most {MAX_ALIGN}, found {align}", unit.describe()),
                    "correct the flat layout: PyTorch aligns parameters to 16 bytes, which is at most 16 elements",
                ));
            }
            if let Some(FlatParam { fqn, .. }) = unit.params.iter().find(|param| param.shape.is_empty()) {
                return Err(Error::unsupported(
                    format!("{}: the parameter `{fqn}` is a scalar", unit.describe()),
                    "remove this parameter from the flat layout: FSDP1 does not flatten scalar parameters, and buffers are not \
                     part of a layout",
                ));
            }
        }
        let flat_params = layout.units.iter().map(|unit| layout.flat(unit)).collect();
        Ok(Self {
            source,
            layout,
            flat_params,
            outside: outside_names(source, layout),
            tensors: Vec::new(),
            storages: Vec::new(),
            replicated: HashMap::new(),
            dtypes: None,
            merged: Vec::new(),
            numbered: None,
        })
    }

    /// Returns the layout to write next to the rank files. Each unit gets the dtype of its parameters in the target,
    /// and its alignment if `use_orig_params` is true.
    pub fn written_layout(&self) -> FlatLayout {
        let mut layout = self.layout.clone();
        for (index, unit) in layout.units.iter_mut().enumerate() {
            unit.align_numel = unit.align_numel().filter(|_| layout.use_orig_params);
            unit.dtype = self.dtypes.as_ref().map_or(unit.dtype, |dtypes| Some(dtypes[index]));
        }
        layout
    }

    /// Returns the unit of a parameter.
    pub fn unit(&self, at: ParameterIndex) -> &'a FlatUnit {
        &self.layout.units[at.unit]
    }

    /// Returns a parameter of the layout.
    pub fn param(&self, at: ParameterIndex) -> &'a FlatParam {
        &self.unit(at).params[at.param]
    }

    /// Returns the name of a parameter that an optimizer updates.
    pub fn trained_name(&self, at: TrainedParameter) -> &Fqn {
        match at {
            TrainedParameter::InUnit(at) => &self.param(at).fqn,
            TrainedParameter::Outside(index) => &self.outside[index],
        }
    }

    /// Returns whether parameters are sharded; otherwise each rank has all parameters.
    pub fn is_sharded(&self) -> bool {
        self.layout.shard_group_size > 1
    }

    /// Returns the part of a parameter that a shard stores, as a range of the unit's flat parameter. The range is empty
    /// if the shard stores no part.
    pub fn local_range(&self, at: ParameterIndex, shard: u64) -> Range<u64> {
        self.flat_params[at.unit].part(at.param, shard)
    }

    /// Returns whether ranks with this shard have the tensor in their files.
    pub fn is_present(&self, item: TreeTensor, shard: u64) -> bool {
        match item.role {
            TensorRole::WithParameter(at) | TensorRole::Slice(at) | TensorRole::Gradient(at) => {
                !self.local_range(at, shard).is_empty()
            }
            _ => true,
        }
    }

    /// Returns the number of elements that a storage has on ranks with this shard.
    pub fn numel(&self, storage: usize, shard: u64) -> u64 {
        match &self.storages[storage].content {
            StorageContent::Nothing => 0,
            StorageContent::Whole(id) => self.source.tensor(*id).numel(),
            StorageContent::Shard { unit, .. } => self.flat_params[*unit].shard_len(),
            StorageContent::Slice { at, .. } => {
                let range = self.local_range(*at, shard);
                range.end - range.start
            }
        }
    }

    /// Adds a storage and returns its index.
    pub fn add_storage(&mut self, dtype: Dtype, content: StorageContent) -> usize {
        self.storages.push(PlannedStorage { dtype, content });
        self.storages.len() - 1
    }

    /// Adds a tensor, and returns its index as a value for the planned state dict.
    pub fn add_tensor(&mut self, storage: usize, role: TensorRole) -> Value {
        Value::Tensor(self.add_tensor_id(storage, role))
    }

    fn add_tensor_id(&mut self, storage: usize, role: TensorRole) -> TensorId {
        let id = TensorId(u32::try_from(self.tensors.len()).expect("fewer than 2^32 tensors"));
        self.tensors.push(TreeTensor { storage, role });
        id
    }

    /// Returns the index of the storage of a source tensor that all ranks have in full, and adds the storage if it is
    /// new. A tensor that occurs several times has only one storage.
    pub fn replicated_storage(&mut self, id: TensorId) -> usize {
        if let Some(storage) = self.replicated.get(&id) {
            return *storage;
        }
        let storage = self.add_storage(self.source.tensor(id).dtype, StorageContent::Whole(id));
        self.replicated.insert(id, storage);
        storage
    }

    /// Returns a copy of a value in which each tensor is a planned tensor that all ranks have in full.
    pub fn replicated_value(&mut self, value: &Value) -> Value {
        let mut value = value.clone();
        value.map_tensors(&mut |id| {
            let storage = self.replicated_storage(id);
            self.add_tensor_id(storage, TensorRole::Whole)
        });
        value
    }
}

/// Returns the names of the model's tensors that are not parameters of the layout. If the source has no model, returns
/// the names in the layout's field `optimizer` that are in no unit.
fn outside_names(source: &Catalog, layout: &FlatLayout) -> Vec<Fqn> {
    let mut known: HashSet<&Fqn> = layout.params().map(|(_, param)| &param.fqn).collect();
    known.extend(layout.units.iter().flat_map(|unit| &unit.shared).map(|shared| &shared.fqn));
    let model = state_dict::model(&source.state).tensors;
    if model.iter().any(|(fqn, _)| known.contains(fqn)) {
        return model.into_iter().map(|(fqn, _)| fqn).filter(|fqn| !known.contains(fqn)).collect();
    }
    let is_flat = |fqn: &Fqn| flat_module(fqn.as_str()).is_some();
    let listed = layout.optimizer.iter().flatten().flatten();
    listed.filter(|fqn| !known.contains(fqn) && !is_flat(fqn)).cloned().collect()
}

impl PlannedStorage {
    /// Returns the source tensors that fill this storage, in the order of their data.
    pub fn tensors(&self) -> Vec<TensorId> {
        match &self.content {
            StorageContent::Nothing => Vec::new(),
            StorageContent::Whole(tensor) | StorageContent::Slice { tensor, .. } => vec![*tensor],
            StorageContent::Shard { tensors, .. } => tensors.clone(),
        }
    }

    /// Returns a chunk table without chunks for each tensor of [`PlannedStorage::tensors`].
    pub fn chunk_tables(&self, source: &Catalog) -> Vec<ChunkTable> {
        self.tensors().iter().map(|id| ChunkTable::new(source.tensor(*id).shape.len())).collect()
    }
}

impl Padding {
    /// Returns the bytes of one padding element; `None` if PyTorch does not pad tensors of this dtype.
    pub fn element(self, dtype: Dtype) -> Option<Vec<u8>> {
        Some(match (self, dtype) {
            (Self::Zero, _) => vec![0; usize::try_from(dtype.itemsize()).expect("a few bytes")],
            (Self::Parameter, Dtype::F64) => 42_f64.to_le_bytes().to_vec(),
            (Self::Parameter, Dtype::F32) => 42_f32.to_le_bytes().to_vec(),
            // bfloat16 for 42, which is 1.3125 * 2^5.
            (Self::Parameter, Dtype::Bf16) => 0x4228_u16.to_le_bytes().to_vec(),
            (Self::Parameter, Dtype::F16) => 0x5140_u16.to_le_bytes().to_vec(),
            (Self::Parameter, _) => return None,
        })
    }
}
