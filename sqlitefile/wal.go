package sqlitefile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// A write-ahead log is a header and frames, each of which is a page with its own header (fileformat2.html
// §4.1; numbers are big-endian):
//
//	header   0 magic, 4 version, 8 page size, 12 count of checkpoints, 16 two salts, 24 checksum
//	frame    0 page number, 4 in the last frame of a transaction: the pages that the database then has,
//	         else 0, 8 the salts, 16 checksum, 24 the page
//
// The checksum of a frame covers its first 8 bytes and the page, and continues that of the frame before
// it, or of the header. After a checkpoint SQLite writes the log from the front again, with other salts.
// Old frames stay behind the new ones.

// Sizes of a write-ahead log.
const (
	walHeaderSize   = 32
	frameHeaderSize = 24
	walMagic        = 0x377f0682 // the lowest bit says that checksums are big-endian
	walVersion      = 3007000

	minPageSize = 512
	maxPageSize = 65536

	// maxFrames bounds the index of a log: 4 GiB of 4 KiB pages. A log that is moved into its
	// database every 1,000 pages does not come near it.
	maxFrames = 1 << 20
)

// WALDamage reports a write-ahead log with committed transactions that SQLite would ignore.
type WALDamage struct {
	Path       string // of the write-ahead log
	Frame      int    // the first frame that cannot be used, counted from 1; 0: the header
	Frames     int    // frames in the file
	Offset     int64  // of that frame
	Lost       int    // committed transactions behind it, at least
	NoDatabase bool   // the log is sound, but its database is missing or empty: SQLite would delete the log

	salts uint64 // of the log, to recognize the same damage in a second scan
}

// Error implements error.
func (e *WALDamage) Error() string {
	where := fmt.Sprintf("in frame %d of %d, at byte %d", e.Frame, e.Frames, e.Offset)
	if e.NoDatabase {
		return fmt.Sprintf("%s holds %d committed transactions, but its database is missing or empty", e.Path, e.Lost)
	}
	if e.Frame == 0 {
		where = "in its header"
	}
	return fmt.Sprintf("%s is damaged %s: at least %d committed transactions behind the damage would be lost", e.Path, where, e.Lost)
}

// ScanWAL examines the write-ahead log of the database path before SQLite opens it. It returns
// a *WALDamage if the log holds committed transactions that SQLite would ignore, nil if the log is
// sound or absent, and any other error if it cannot be read. It writes nothing.
//
// SQLite reads a log up to the first frame whose checksum is wrong, and ignores what is behind it: a
// transaction that a power cut interrupted looks like that. So does a damaged frame in the
// middle. ScanWAL can distinguish the two if every writer of the log used synchronous=FULL, which
// syncs a transaction before the next one is written:
//
//   - The checksum of each frame continues that of the frame before it. A frame that continues a
//     commit frame was therefore written after that commit was synced. If both are behind the
//     first unusable frame, and have the salts of the header, then all frames up to the commit
//     were on the disk once: the unusable frame is damage.
//   - Frames behind the end of the log are no proof by themselves. A transaction that was rolled
//     back, or that a power cut interrupted, leaves frames there, possibly with a commit frame, but
//     never a frame that continues that commit frame. Frames with other salts are of an earlier
//     log, whose content is in the database.
//   - The header is synced before the first frame. If it is damaged, then a transaction of two
//     frames or more behind it is lost unless the database has the newest version of all of its
//     pages: a power cut during the first write of a new header leaves frames of the log before,
//     which the database has.
//
// A store that opens the log of a process that was killed should checkpoint it before it writes. The
// last transaction may be complete and not synced: a power cut that tears it together with the next
// one would look like damage.
//
// ScanWAL does not detect damage to the last transaction, or to the last two if the commit frame of
// the first of them is destroyed with its header, since that looks like one interrupted transaction. Nor
// does it detect a log that was cut off at its end, removed, or replaced by an older one. Stores
// detect those by a record of the newest transaction that they keep elsewhere.
//
// Other processes may use the database meanwhile: damage is reported only if two scans see it in the
// same place. ScanWAL opens the database itself only if the header of the log is damaged. The
// process should have no SQLite connection to the database then, since closing a file drops a
// process's locks on it.
func ScanWAL(path string) error {
	var seen *WALDamage // by the previous scan
	for range 5 {
		damage, err := scanWALOnce(path)
		switch {
		case err != nil || damage == nil:
			return err
		case seen != nil && damage.Frame == seen.Frame && damage.salts == seen.salts:
			return damage
		}
		seen = damage // perhaps a frame that is being written
	}
	return nil // the log changes faster than it can be read, so its writer is able to use it
}

// scanWALOnce is one pass of ScanWAL.
func scanWALOnce(path string) (*WALDamage, error) {
	w, err := openWAL(path)
	if w == nil || err != nil {
		return nil, err
	}
	defer w.close()
	if err := w.scan(); err != nil {
		return nil, err
	}
	d := &WALDamage{Path: path + "-wal", Frames: w.frames, Lost: w.lost, salts: w.salts}
	if w.lost > 0 {
		if d.Frame = w.firstBad; d.Frame > 0 {
			d.Offset = w.offset(d.Frame)
		}
		return d, nil
	}
	if info, err := os.Stat(path); w.commits > 0 && (errors.Is(err, fs.ErrNotExist) || err == nil && info.Size() == 0) {
		d.NoDatabase, d.Lost = true, w.commits
		return d, nil
	}
	return nil, nil
}

// wal is an open write-ahead log. Its frames are counted from 1.
type wal struct {
	path     string // of the database
	file     *os.File
	header   [walHeaderSize]byte
	headerOK bool
	order    binary.ByteOrder // of checksums
	pageSize int
	salts    uint64 // those of the header, or if it is damaged of the first frames that can be used
	frames   int    // whole frames in the file
	buf      []byte // one frame

	// Results of scan.
	valid    int // frames up to the last commit that SQLite reads
	commits  int // transactions in them
	firstBad int // the first frame that SQLite does not read, 0 if the header is damaged
	lost     int // committed transactions that are proven to be behind it; 0: no damage
	lastLost int // the commit frame of the last of them
}

// openWAL opens the log of a database. It returns nil if there is none, or one without a frame.
func openWAL(path string) (*wal, error) {
	info, err := os.Lstat(path + "-wal")
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s-wal is not a regular file; move it away", path)
	}
	f, err := os.Open(path + "-wal")
	if errors.Is(err, fs.ErrNotExist) { // the last connection was closed meanwhile
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	w := &wal{path: path, file: f, order: binary.LittleEndian}
	_, err = f.ReadAt(w.header[:], 0)
	if errors.Is(err, io.EOF) || err == nil && info.Size() <= walHeaderSize+frameHeaderSize {
		w.close()
		return nil, nil
	}
	if err == nil {
		err = w.readHeader(info.Size())
	}
	if err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (w *wal) close() { _ = w.file.Close() } // only read

// readHeader checks the header. If it is damaged, the page size is that with which frames continue
// each other, and the salts are those of the first two frames that do. It tries each size with the first
// 64 frames, so that it does not read a whole file of garbage for each.
func (w *wal) readHeader(size int64) error {
	h := w.header[:]
	magic := binary.BigEndian.Uint32(h)
	if magic == walMagic|1 {
		w.order = binary.BigEndian
	}
	w.pageSize = int(binary.BigEndian.Uint32(h[8:]))
	w.salts = binary.BigEndian.Uint64(h[16:])
	sum := checksum(w.order, 0, h[:24])
	w.headerOK = magic&^1 == walMagic && binary.BigEndian.Uint32(h[4:]) == walVersion &&
		isPageSize(w.pageSize) && sum == binary.BigEndian.Uint64(h[24:])
	if w.headerOK {
		w.setPageSize(w.pageSize, size)
		return nil
	}
	candidates := []int{w.pageSize, 4096}
	for s := minPageSize; s <= maxPageSize; s *= 2 {
		candidates = append(candidates, s)
	}
	for _, s := range candidates {
		if !isPageSize(s) {
			continue
		}
		w.setPageSize(s, size)
		for i := 2; i <= min(w.frames, 64); i++ {
			before, err := w.frame(i - 1)
			if err != nil {
				return err
			}
			f, err := w.frame(i)
			if err != nil {
				return err
			}
			if f.salts == before.salts && w.continues(before, f) {
				w.salts = f.salts
				return nil
			}
		}
	}
	w.frames = 0 // nothing in it can be used
	return nil
}

func (w *wal) setPageSize(pageSize int, size int64) {
	w.pageSize = pageSize
	w.frames = int(min((size-walHeaderSize)/int64(frameHeaderSize+pageSize), maxFrames))
	w.buf = make([]byte, frameHeaderSize+pageSize)
}

func isPageSize(n int) bool { return n >= minPageSize && n <= maxPageSize && n&(n-1) == 0 }

// offset returns where a frame begins.
func (w *wal) offset(i int) int64 {
	return walHeaderSize + int64(i-1)*int64(frameHeaderSize+w.pageSize)
}

// frame is the header of a frame.
type frame struct {
	page   uint32 // the number of its page
	commit uint32 // of the last frame of a transaction: pages of the database; else 0
	salts  uint64
	sum    uint64 // over all frames up to this one
}

// frame reads a frame; w.buf holds it until the next call. Beyond the end of the file a frame is all
// zero, and continues no other.
func (w *wal) frame(i int) (frame, error) {
	if _, err := w.file.ReadAt(w.buf, w.offset(i)); err != nil && !errors.Is(err, io.EOF) {
		return frame{}, err
	} else if err != nil {
		clear(w.buf) // another process has cut the log
	}
	return parseFrame(w.buf), nil
}

// frameHeader reads the header of a frame alone.
func (w *wal) frameHeader(i int) (frame, error) {
	var b [frameHeaderSize]byte
	_, err := w.file.ReadAt(b[:], w.offset(i))
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return parseFrame(b[:]), err
}

func parseFrame(b []byte) frame {
	return frame{binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:])}
}

// continues reports whether f, which is in w.buf, was written as the successor of before.
func (w *wal) continues(before, f frame) bool {
	return f.page != 0 && checksum(w.order, checksum(w.order, before.sum, w.buf[:8]), w.buf[frameHeaderSize:]) == f.sum
}

// checksum continues a checksum over b (fileformat2.html §4.2), whose length is a multiple of 8. The
// magic of the header gives the byte order of the words that are added. sum has the first of the two
// resulting words in its upper half.
func checksum(order binary.ByteOrder, sum uint64, b []byte) uint64 {
	s0, s1 := uint32(sum>>32), uint32(sum)
	for ; len(b) >= 8; b = b[8:] {
		s0 += order.Uint32(b) + s1
		s1 += order.Uint32(b[4:]) + s0
	}
	return uint64(s0)<<32 | uint64(s1)
}

// scan finds the end of the log as SQLite sees it, and committed transactions behind that.
func (w *wal) scan() error {
	next := 1
	before := frame{sum: binary.BigEndian.Uint64(w.header[24:]), salts: w.salts}
	if w.headerOK {
		for ; next <= w.frames; next++ {
			f, err := w.frame(next)
			if err != nil {
				return err
			}
			if f.salts != w.salts || !w.continues(before, f) {
				break
			}
			if before = f; f.commit != 0 {
				w.valid = next
				w.commits++
			}
		}
		if next > w.frames {
			return nil
		}
		w.firstBad = next
	}
	if err := w.scanBehind(next); err != nil {
		return err
	}
	if !w.headerOK && w.lost > 0 {
		nothingLost, err := w.inDatabase()
		if err != nil {
			return err
		}
		if nothingLost {
			w.lost, w.lastLost = 0, 0
		}
	}
	return nil
}

// scanBehind looks for committed transactions in the frames from first on, of which SQLite reads
// none. The rules are in the comment of ScanWAL. It goes through the frames once, in runs in which each
// frame continues the one before. Commits of a run are pending until a later frame proves that they were
// synced, and are counted as lost then.
func (w *wal) scanBehind(first int) error {
	var before frame // the predecessor
	usable := false  // it has the right salts
	sound := false   // usable, and its commit field can be relied on
	pending := 0     // commits in this run of frames, each of which continues the one before
	proven := false  // the run is known to have been synced
	for i := first; i <= w.frames; i++ {
		f, err := w.frameHeader(i)
		if err != nil {
			return err
		}
		if f.salts != w.salts {
			usable, sound, pending, proven = false, false, 0, false
			continue
		}
		if f, err = w.frame(i); err != nil {
			return err
		}
		continued := usable && w.continues(before, f)
		switch {
		case !continued:
			pending, proven = 0, false
		case sound && before.commit != 0, !w.headerOK && f.commit != 0:
			// The header is synced before its first frame is written: if it is damaged,
			// one transaction is enough.
			proven = true
		}
		if proven && pending > 0 {
			w.lost, w.lastLost, pending = w.lost+pending, i-1, 0
		}
		// A frame that does not continue its predecessor may be a mixture of old and new
		// sectors. Its commit field counts if it is in one sector with the salts. Frames begin at
		// multiples of 8, so a boundary of sectors can separate the two only at offset 8.
		if sound = continued || (w.offset(i)+8)%512 != 0; sound && f.commit != 0 {
			if pending++; proven {
				w.lost, w.lastLost, pending = w.lost+1, i, 0
			}
		}
		before, usable = f, true
	}
	return nil
}

// inDatabase reports whether the database has the newest version of each page in the log: then nothing
// is lost with the log.
func (w *wal) inDatabase() (bool, error) {
	db, err := os.Open(w.path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	defer func() { _ = db.Close() }()
	newest, pages := map[uint32]int{}, uint32(0)
	for i := 1; i <= w.lastLost; i++ {
		f, err := w.frameHeader(i)
		if err != nil {
			return false, err
		}
		if f.salts == w.salts {
			newest[f.page], pages = i, f.commit // of the last frame: the size of the database
		}
	}
	page := make([]byte, w.pageSize)
	for number, i := range newest {
		if number > pages {
			continue // the last transaction cut the database off
		}
		if _, err := w.frame(i); err != nil {
			return false, err
		}
		if _, err := db.ReadAt(page, int64(number-1)*int64(w.pageSize)); err != nil && !errors.Is(err, io.EOF) {
			return false, err
		} else if err != nil || !bytes.Equal(page, w.buf[frameHeaderSize:]) {
			return false, nil
		}
	}
	return true, nil
}
