package sqlitefile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
)

// A File reads the leaves of b-trees only. They hold all rows, and can be recognized without the pages
// above them (fileformat2.html §1.6; numbers are big-endian):
//
//	0  type: 0x0d leaf of a table, 0x0a leaf of an index
//	1  the first free block
//	3  the number of cells
//	5  where their content begins; 0: 65536
//	7  the number of fragmented free bytes
//	8  the offset of each cell in the page, 2 bytes each
//	…  the cells, which fill the page from its end
//
// A cell is the size of its payload as a varint, in a table the row id as another one, then the payload.
// A leaf has only the beginning of a large payload, followed by the number of its first overflow page;
// each of these begins with the number of the next one. Page 1 begins with the header of the file
// (§1.3); offsets count from the beginning of the page there too.

// Layout of a page.
const (
	fileHeaderSize = 100
	tableLeaf      = 0x0d
	indexLeaf      = 0x0a
	leafHeaderSize = 8

	headerMagic = "SQLite format 3\x00"

	maxPages  = 1<<32 - 2 // of a database
	minUsable = 480       // bytes of a page without its reserved end; SQLite accepts no fewer
)

// Record is a row of some table, or an entry of some index.
type Record struct {
	Index  bool    // an entry of an index: the indexed columns, then the RowID
	RowID  int64   // of a table's row
	Values []Value // valid until the next record
}

// File is a database file that is read page by page. Nothing in it has to be intact. It is for one
// goroutine.
type File struct {
	db       *os.File
	size     int64
	wal      *wal // nil: none
	damage   *WALDamage
	pageSize int
	usable   int // bytes of a page without its reserved end
	pages    uint32

	frames       map[uint32][]int32 // the frames of the log that hold each page, ascending
	page         []byte             // the leaf that is being read
	overflowPage []byte
	payload      []byte  // of a record with overflow pages
	values       []Value // of the record that was read last
}

// Stats count what Records has read.
type Stats struct {
	Pages    uint32 // of the database, those only in its log included
	Records  int    // records read
	BadCells int    // entries of leaf pages that are no records
}

// OpenFile opens a database and its write-ahead log for reading. The log may be damaged, and the
// database may lack its header or its end. The process must have no SQLite connection to the
// database: closing a File would drop its locks. The database should not be written meanwhile.
func OpenFile(path string) (*File, error) {
	info, err := os.Lstat(path)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		return nil, err
	}
	db, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	f := &File{db: db, size: info.Size(), frames: map[uint32][]int32{}}
	if err := f.load(path); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Close closes the file.
func (f *File) Close() error {
	if f.wal != nil {
		f.wal.close()
	}
	return f.db.Close()
}

// Damage returns the damage of the write-ahead log, nil if it has none.
func (f *File) Damage() *WALDamage { return f.damage }

// ApplicationID returns the application id in the header of the database, 0 if that is damaged. The log
// may have a newer copy of page 1: the id of a new database is in the log alone until a checkpoint.
func (f *File) ApplicationID() uint32 {
	valid := 0
	if f.wal != nil {
		valid = f.wal.valid
	}
	if n, _ := f.readPage(f.page, 1, valid); n < fileHeaderSize || string(f.page[:16]) != headerMagic {
		return 0
	}
	return binary.BigEndian.Uint32(f.page[68:])
}

// load finds out the size of a page. A sound header of the log decides, since it has a checksum and that
// of the database has none. Where neither is usable, the size is guessed.
func (f *File) load(path string) (err error) {
	var header [fileHeaderSize]byte
	if _, err := f.db.ReadAt(header[:], 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if f.wal, err = openWAL(path); err != nil {
		return err
	}
	reserved := 0
	headerOK := string(header[:16]) == headerMagic
	if headerOK {
		if f.pageSize = int(binary.BigEndian.Uint16(header[16:])); f.pageSize == 1 {
			f.pageSize = maxPageSize
		}
		reserved = int(header[20])
	}
	if w := f.wal; w != nil {
		if err := w.scan(); err != nil {
			return err
		}
		if w.frames > 0 && (!isPageSize(f.pageSize) || w.headerOK) {
			f.pageSize = w.pageSize
		}
		if w.lost > 0 {
			f.damage = &WALDamage{Path: path + "-wal", Frame: w.firstBad, Frames: w.frames, Lost: w.lost, Offset: max(0, w.offset(w.firstBad))}
		}
	}
	if !isPageSize(f.pageSize) {
		if f.pageSize, err = f.guessPageSize(); err != nil {
			return err
		}
	}
	// The header may be damaged in this byte alone. Our databases reserve nothing.
	if f.usable = f.pageSize - reserved; f.usable < minUsable {
		f.usable = f.pageSize
	}
	f.page, f.overflowPage = make([]byte, f.pageSize), make([]byte, f.pageSize)
	// Rounded up: a page that was cut off may have whole cells.
	f.pages = uint32(min((f.size+int64(f.pageSize)-1)/int64(f.pageSize), maxPages))
	return f.indexWAL()
}

// indexWAL notes which frames hold each page, also those behind damage. Frames with other salts are of an
// earlier log, all of which is in the database.
func (f *File) indexWAL() error {
	w := f.wal
	if w == nil || w.pageSize != f.pageSize {
		return nil
	}
	for i := 1; i <= max(w.valid, w.lastLost); i++ {
		h, err := w.frameHeader(i)
		if err != nil {
			return err
		}
		if h.salts != w.salts || h.page == 0 || h.page > maxPages {
			continue
		}
		f.frames[h.page] = append(f.frames[h.page], int32(i))
	}
	return nil
}

// guessPageSize returns the size with which most of the first MiB looks like leaf pages, for a file
// without a header. It compares bytes, since a smaller size has more pages.
func (f *File) guessPageSize() (best int, err error) {
	start := make([]byte, min(f.size, 1<<20))
	n, err := f.db.ReadAt(start, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	best, bestBytes := 4096, 0
	for size := minPageSize; size <= maxPageSize; size *= 2 {
		leaves := 0
		for at := size; at+size <= n; at += size { // page 1 has another layout
			if looksLikeLeaf(start[at : at+size]) {
				leaves++
			}
		}
		if leaves*size > bestBytes {
			best, bestBytes = size, leaves*size
		}
	}
	return best, nil
}

// looksLikeLeaf reports whether b is a table leaf page of this size: its last cell ends where the
// page does. With a wrong size, b ends in the middle of a page or in another one.
func looksLikeLeaf(b []byte) bool {
	cells, content := leafHeader(b)
	if b[0] != tableLeaf || cells == 0 || leafHeaderSize+2*cells > content || content > len(b) {
		return false
	}
	last := 0 // where the last cell begins
	for i := range cells {
		start := int(binary.BigEndian.Uint16(b[leafHeaderSize+2*i:]))
		if start < content || start >= len(b) {
			return false
		}
		last = max(last, start)
	}
	size, sizeLen := varint(b[last:])
	_, rowIDLen := varint(b[last+sizeLen:])
	f := File{usable: len(b)}
	local := f.localSize(int(min(size, maxPayload)), false)
	end := last + sizeLen + rowIDLen + local
	if int(size) > local {
		end += 4 // the number of the first overflow page
	}
	return sizeLen > 0 && rowIDLen > 0 && end == len(b)
}

// leafHeader returns the number of cells of a leaf page, and where their content begins.
func leafHeader(b []byte) (cells, content int) {
	if content = int(binary.BigEndian.Uint16(b[5:])); content == 0 {
		content = maxPageSize
	}
	return int(binary.BigEndian.Uint16(b[3:])), content
}

// Records calls fn with each row of each table leaf page and each entry of each index leaf page, and
// returns its error. It does not know which table a page belongs to: fn recognizes its rows by their
// columns. Pages that are free now are read too, and a row is returned again for each copy of its page.
// The order is:
//
//  1. what SQLite reads: the newest copy of each page, in the log up to the first damage or in the database
//  2. the pages in committed transactions behind the damage, which SQLite ignores
//  3. if there is damage, the database's copy of the pages that the log replaces: a checkpoint may have
//     written it from a frame that was damaged later
//
// Damaged bytes may look like a row, so fn has to check what it is given.
func (f *File) Records(fn func(*Record) error) (Stats, error) {
	st := Stats{Pages: f.pages}
	valid, lastLost := 0, 0 // frames: those that SQLite reads, and the last one behind damage
	if f.wal != nil {
		valid, lastLost = f.wal.valid, f.wal.lastLost
	}
	for p := uint32(1); p <= f.pages; p++ {
		if err := f.readLeaf(&st, p, valid, fn); err != nil {
			return st, err
		}
	}
	inWAL := slices.Sorted(maps.Keys(f.frames))
	for _, p := range inWAL {
		if p <= f.pages {
			continue
		}
		st.Pages = p // the log makes the database longer
		if err := f.readLeaf(&st, p, valid, fn); err != nil {
			return st, err
		}
	}
	if lastLost == 0 {
		return st, nil
	}
	if err := f.readBehindDamage(&st, valid+1, lastLost, fn); err != nil {
		return st, err
	}
	for _, p := range inWAL {
		if p <= f.pages {
			if err := f.readLeaf(&st, p, 0, fn); err != nil {
				return st, err
			}
		}
	}
	return st, nil
}

// readBehindDamage reads the leaf pages in the frames from first to last, which SQLite ignores. It takes
// the newest copy of an overflow page up to the end of the leaf's transaction: later copies may belong to
// other rows.
func (f *File) readBehindDamage(st *Stats, first, last int, fn func(*Record) error) error {
	end := 0 // of the transaction
	for i := first; i <= last; i++ {
		h, err := f.wal.frame(i)
		if err != nil || h.salts != f.wal.salts {
			continue
		}
		copy(f.page, f.wal.buf[frameHeaderSize:])
		if i > end {
			end = f.endOfTransaction(i, last)
		}
		if err := f.leaf(st, h.page, f.page, end, fn); err != nil {
			return err
		}
	}
	return nil
}

// endOfTransaction returns the commit frame of the transaction of frame i.
func (f *File) endOfTransaction(i, last int) int {
	for ; i < last; i++ {
		if h, err := f.wal.frameHeader(i); err == nil && h.salts == f.wal.salts && h.commit != 0 {
			break
		}
	}
	return i
}

// readLeaf reads the records of the newest copy of a page up to a frame of the log. A page that
// the disk does not return is skipped.
func (f *File) readLeaf(st *Stats, p uint32, upTo int, fn func(*Record) error) error {
	n, _ := f.readPage(f.page, p, upTo)
	return f.leaf(st, p, f.page[:n], upTo, fn)
}

// readPage reads the newest copy of a page up to a frame of the log, or that of the database, and
// returns how many bytes there are: fewer than a page at the end of a file that was cut off.
func (f *File) readPage(buf []byte, p uint32, upTo int) (int, error) {
	newest := 0
	for _, i := range f.frames[p] {
		if int(i) <= upTo {
			newest = int(i)
		}
	}
	if newest > 0 {
		return f.wal.file.ReadAt(buf, f.wal.offset(newest)+frameHeaderSize)
	}
	n, err := f.db.ReadAt(buf, int64(p-1)*int64(f.pageSize))
	if errors.Is(err, io.EOF) && n > 0 {
		clear(buf[n:])
		err = nil
	}
	return n, err
}

// leaf reads the records of a page, if it is a leaf. Cells that are damaged are skipped.
func (f *File) leaf(st *Stats, p uint32, page []byte, upTo int, fn func(*Record) error) error {
	header := page
	if p == 1 {
		header = page[min(fileHeaderSize, len(page)):]
	}
	if len(header) < leafHeaderSize || header[0] != tableLeaf && header[0] != indexLeaf {
		return nil
	}
	r := Record{Index: header[0] == indexLeaf}
	cells, _ := leafHeader(header)
	space := f.pageSize // cells do not overlap, which bounds the overflow pages that are read
	for i := range cells {
		at := leafHeaderSize + 2*i
		if at+2 > len(header) || space <= 0 {
			st.BadCells += cells - i
			return nil
		}
		size, ok := f.cell(&r, page, int(binary.BigEndian.Uint16(header[at:])), upTo)
		if space -= size; !ok {
			st.BadCells++
			continue
		}
		st.Records++
		if err := fn(&r); err != nil {
			return err
		}
	}
	return nil
}

// cell reads one cell of a leaf page with its overflow pages. A damaged cell can claim any length, so
// each is checked against the rest of the page. It returns the bytes of the payload that are in the page.
func (f *File) cell(r *Record, page []byte, start, upTo int) (local int, ok bool) {
	if start < leafHeaderSize || start >= min(len(page), f.usable) {
		return 0, false
	}
	b := page[start:min(len(page), f.usable)]
	size, n := varint(b)
	if n == 0 || size == 0 || size > maxPayload {
		return 0, false
	}
	b = b[n:]
	r.RowID = 0
	if !r.Index {
		rowID, n := varint(b)
		if n == 0 {
			return 0, false
		}
		r.RowID = int64(rowID)
		b = b[n:]
	}
	local = f.localSize(int(size), r.Index)
	if len(b) < local {
		return 0, false
	}
	payload := b[:local]
	if rest := int(size) - local; rest > 0 {
		f.payload = append(f.payload[:0], payload...)
		if len(b) < local+4 || !f.overflow(binary.BigEndian.Uint32(b[local:]), rest, upTo) {
			return local, false
		}
		payload = f.payload
	}
	if r.Values, ok = parseRecord(payload, f.values[:0]); ok {
		f.values = r.Values
	}
	return local, ok
}

// localSize returns how many bytes of a payload are in the leaf page itself (fileformat2.html §1.6). The
// others are in overflow pages. All overflow pages are full if the leaf has space for the remainder.
func (f *File) localSize(size int, index bool) int {
	maxLocal := f.usable - 35
	if index {
		maxLocal = (f.usable-12)*64/255 - 23
	}
	if size <= maxLocal {
		return size
	}
	minLocal := (f.usable-12)*32/255 - 23
	if k := minLocal + (size-minLocal)%(f.usable-4); k <= maxLocal {
		return k
	}
	return minLocal
}

// overflow appends the rest of a payload from a chain of overflow pages. It reads no more pages than the
// payload needs, so a damaged chain that leads back to itself ends.
func (f *File) overflow(p uint32, left, upTo int) bool {
	for left > 0 {
		if p == 0 || p > maxPages {
			return false
		}
		n, err := f.readPage(f.overflowPage, p, upTo)
		if size := min(left, f.usable-4); err != nil || n < 4+size {
			return false
		} else {
			f.payload = append(f.payload, f.overflowPage[4:4+size]...)
			left -= size
		}
		p = binary.BigEndian.Uint32(f.overflowPage)
	}
	return true
}
