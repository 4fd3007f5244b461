//! Byte planes of words, each as it is or as a coded stream (FORMAT.md, "Planes" and "Delta").

use crate::error::Result;

use super::Workspace;
use super::input::{Input, flaw};
use super::words::{self, Order, Transform};

/// Most bytes of an element.
pub(super) const WIDTH_LIMIT_BYTES: usize = 8;

/// A bit for each plane, by its index: set where the plane is stored as it is.
pub(super) type Verbatim = u8;

/// Splits `raw` by the transform and appends header, planes and tail.
pub(super) fn encode(
    width_bytes: usize,
    transform: Transform<'_>,
    verbatim: Verbatim,
    raw: &[u8],
    workspace: &mut Workspace,
    out: &mut Vec<u8>,
) {
    let Workspace { coder, planes, .. } = workspace;
    let count = raw.len() / width_bytes;
    let detail = match transform {
        Transform::Rotation(bits) => bits as u8,
        Transform::Difference(order, _) => order.number(),
    };
    out.extend_from_slice(&[width_bytes as u8, detail, verbatim]);
    let header_length = out.len();
    let verbatim_count = verbatim.count_ones() as usize;
    out.resize(header_length + verbatim_count * count, 0);
    grow(planes, (width_bytes - verbatim_count) * count);
    {
        let mut stored = out[header_length..].chunks_exact_mut(count.max(1));
        let mut coded = planes.chunks_exact_mut(count.max(1));
        let mut targets: [&mut [u8]; WIDTH_LIMIT_BYTES] = Default::default();
        for (plane, target) in targets[..width_bytes].iter_mut().enumerate() {
            let source = if verbatim >> plane & 1 == 1 { &mut stored } else { &mut coded };
            *target = source.next().unwrap_or_default();
        }
        words::split(width_bytes, transform, raw, &mut targets[..width_bytes]);
    }
    for plane in 0..width_bytes - verbatim_count {
        coder.append(&planes[plane * count..(plane + 1) * count], out);
    }
    out.extend_from_slice(&raw[count * width_bytes..]);
}

/// Decodes what [`encode`] wrote; with a base the transform is a difference, without one a rotation.
pub(super) fn decode(
    mut input: Input<'_>,
    base: Option<&[u8]>,
    raw: &mut [u8],
    workspace: &mut Workspace,
) -> Result<()> {
    let Workspace { coder, planes, .. } = workspace;
    let width_bytes = read_width(&mut input)?;
    let detail = input.byte()?;
    let transform = match base {
        Some(base) => Transform::Difference(Order::from_number(detail)?, base),
        None if usize::from(detail) < 8 * width_bytes => Transform::Rotation(u32::from(detail)),
        None => return Err(flaw(format!("rotates {width_bytes} bytes by: {detail}"))),
    };
    let verbatim = input.byte()?;
    if usize::from(verbatim) >> width_bytes != 0 {
        return Err(flaw(format!("has more planes than {width_bytes} in: {verbatim:#010b}")));
    }
    let count = raw.len() / width_bytes;
    let mut sources: [&[u8]; WIDTH_LIMIT_BYTES] = Default::default();
    for (plane, source) in sources[..width_bytes].iter_mut().enumerate() {
        if verbatim >> plane & 1 == 1 {
            *source = input.bytes(count)?;
        }
    }
    let coded_count = width_bytes - verbatim.count_ones() as usize;
    grow(planes, coded_count * count);
    for plane in 0..coded_count {
        coder.read(&mut input, &mut planes[plane * count..(plane + 1) * count])?;
    }
    let mut coded = planes.chunks_exact(count.max(1));
    for (plane, source) in sources[..width_bytes].iter_mut().enumerate() {
        if verbatim >> plane & 1 == 0 {
            *source = coded.next().unwrap_or_default();
        }
    }
    let tail = &mut raw[count * width_bytes..];
    tail.copy_from_slice(input.bytes(tail.len())?);
    input.finish()?;
    words::join(width_bytes, transform, &sources[..width_bytes], raw);
    Ok(())
}

/// Reads the width of an element: 1, 2, 4 or 8 bytes.
pub(super) fn read_width(input: &mut Input<'_>) -> Result<usize> {
    match input.byte()? {
        width @ (1 | 2 | 4 | 8) => Ok(usize::from(width)),
        width => Err(flaw(format!("has elements of an illegal width: {width}"))),
    }
}

/// Makes a reused buffer at least so long; what it holds has no meaning.
pub(super) fn grow(buffer: &mut Vec<u8>, length_bytes: usize) {
    if buffer.len() < length_bytes {
        buffer.resize(length_bytes, 0);
    }
}
