// Large pictures are made smaller before they are sent: a phone's photograph is more than a service needs or takes.
// Those of formats that browsers show and the service does not take, such as GIF, become JPEG.

const LONGEST = 2048;   // pixels of the longer side
const QUALITY = 0.92;   // of the JPEG
const TAKEN = /^(\xff\xd8|\x89PNG|RIFF|....ftyp)/s;   // first bytes of JPEG, PNG, WEBP; AVIF and HEIC
const GROUND = "#fff";  // shows through transparent pictures, as in the service

let queue = Promise.resolve();   // one after the other: a decoded photograph has some 200 MB

/** The file, smaller and upright where it is large, or of another format, and the browser can decode it; else as it is. */
export function shrunk(file) {
  const done = queue.then(() => shrink(file)).catch(() => file);
  queue = done;
  return done;
}

async function shrink(file) {
  const head = String.fromCharCode(...new Uint8Array(await file.slice(0, 8).arrayBuffer()));
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  const scale = Math.min(LONGEST / Math.max(bitmap.width, bitmap.height), 1);
  try {
    if (scale === 1 && TAKEN.test(head)) return file;
    const canvas = new OffscreenCanvas(Math.round(bitmap.width * scale) || 1, Math.round(bitmap.height * scale) || 1);
    const brush = canvas.getContext("2d");
    brush.fillStyle = GROUND;
    brush.fillRect(0, 0, canvas.width, canvas.height);
    brush.imageSmoothingQuality = "high";
    brush.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return await canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
  } finally {
    bitmap.close();
  }
}
