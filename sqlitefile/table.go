package sqlitefile

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
)

const (
	tableInterior      = 0x05
	interiorHeaderSize = 12
	maxDepth           = 20 // of a b-tree; SQLite's own bound
	maxReadPages       = 32 // of one read
)

// ErrNotSound says that the pages of a Table do not form a b-tree.
var ErrNotSound = errors.New("not a sound b-tree")

// Table reads the rows of one table in the order of their row ids. It reads pages and does not ask
// SQLite, which needs five times as long to return a row. It is for one goroutine. NewTable reads the
// interior pages, Rows reads leaves, Only makes a Table of some leaves for another goroutine.
//
// The file must hold all that was committed, with nothing left in a write-ahead log, and no process may
// write to it meanwhile. A Table detects pages that do not fit together, but the caller checks what the
// rows say, and asks SQLite when they are not what it expects.
type Table struct {
	f      File     // without a write-ahead log
	leaves []uint32 // page numbers, in the order of row ids
	buf    []byte   // leaves that were read together
	first  int      // the index in leaves of the first of these
}

// NewTable reads the table of an open file whose b-tree begins at the page root
// (sqlite_schema.rootpage): at first its interior pages. The caller closes the file, after the process's
// SQLite connections to it: closing a file drops a process's locks on it.
func NewTable(db *os.File, root uint32) (*Table, error) {
	t := &Table{f: File{db: db}}
	info, err := db.Stat()
	if err != nil {
		return nil, err
	}
	var header [fileHeaderSize]byte
	if _, err := db.ReadAt(header[:], 0); err != nil {
		return nil, err
	}
	f := &t.f
	if f.pageSize = int(binary.BigEndian.Uint16(header[16:])); f.pageSize == 1 {
		f.pageSize = maxPageSize
	}
	f.size, f.usable = info.Size(), f.pageSize-int(header[20])
	if string(header[:16]) != headerMagic || !isPageSize(f.pageSize) || f.usable < minUsable {
		return nil, ErrNotSound
	}
	f.pages = uint32(min(f.size/int64(f.pageSize), maxPages))
	f.page, f.overflowPage = make([]byte, f.pageSize), make([]byte, f.pageSize)
	t.leaves, err = t.readTree(root)
	return t, err
}

// Only returns a Table of some leaves, by their indexes. It has its own buffers, so that another
// goroutine may use it. The file is shared: ReadAt has no position.
func (t *Table) Only(leaves []int) *Table {
	c := &Table{f: File{db: t.f.db, size: t.f.size, pageSize: t.f.pageSize, usable: t.f.usable, pages: t.f.pages, overflowPage: make([]byte, t.f.pageSize)}}
	for _, i := range leaves {
		c.leaves = append(c.leaves, t.leaves[i])
	}
	return c
}

// Leaves returns the number of pages that hold rows.
func (t *Table) Leaves() int { return len(t.leaves) }

// readTree returns the leaf pages, from the level of the root down: all leaves of a b-tree have the same
// depth. The type of a level's first page is that of the level. A page of another type is an error of
// appendChildren in an interior level, and of Rows among the leaves.
func (t *Table) readTree(root uint32) ([]uint32, error) {
	level := []uint32{root}
	for range maxDepth {
		var below []uint32
		for i, p := range level {
			if err := t.readPages(t.f.page, p); err != nil {
				return nil, err
			}
			if i == 0 && t.f.page[0] == tableLeaf {
				return level, nil
			}
			var err error
			if below, err = t.appendChildren(below, t.f.page); err != nil {
				return nil, err
			}
			if len(below) > int(t.f.pages) { // a page is its own descendant
				return nil, ErrNotSound
			}
		}
		level = below
	}
	return nil, ErrNotSound
}

// appendChildren appends the child pages of an interior page: a cell begins with the number of the child
// left of its key, and the header has that of the last child (fileformat2.html §1.6). It does not read
// keys, so a leaf in a wrong place is noticed by its rows only.
func (t *Table) appendChildren(list []uint32, page []byte) ([]uint32, error) {
	cells := int(binary.BigEndian.Uint16(page[3:]))
	if page[0] != tableInterior || interiorHeaderSize+2*cells > t.f.usable {
		return nil, ErrNotSound
	}
	for i := range cells {
		at := int(binary.BigEndian.Uint16(page[interiorHeaderSize+2*i:]))
		if at < interiorHeaderSize || at+4 > t.f.usable {
			return nil, ErrNotSound
		}
		list = append(list, binary.BigEndian.Uint32(page[at:]))
	}
	return append(list, binary.BigEndian.Uint32(page[8:])), nil
}

// readPages fills buf with the pages from p on.
func (t *Table) readPages(buf []byte, p uint32) error {
	if p == 0 || int64(p-1)*int64(t.f.pageSize)+int64(len(buf)) > t.f.size {
		return ErrNotSound
	}
	n, err := t.f.db.ReadAt(buf, int64(p-1)*int64(t.f.pageSize))
	if errors.Is(err, io.EOF) && n == len(buf) {
		err = nil
	}
	return err
}

// Rows calls fn with the rows of leaf i, counted from 0, and returns its error. A leaf that is not sound
// is ErrNotSound, after the rows before the fault. Row ids ascend within the leaf; the caller checks that
// those of the next leaf are higher.
func (t *Table) Rows(i int, fn func(*Record) error) error {
	page, err := t.leaf(i)
	if err != nil {
		return err
	}
	cells, _ := leafHeader(page)
	if page[0] != tableLeaf || leafHeaderSize+2*cells > t.f.usable {
		return ErrNotSound
	}
	var r Record
	for k := range cells {
		last := r.RowID
		if _, ok := t.f.cell(&r, page, int(binary.BigEndian.Uint16(page[leafHeaderSize+2*k:])), 0); !ok || k > 0 && r.RowID <= last {
			return ErrNotSound
		}
		if err := fn(&r); err != nil {
			return err
		}
	}
	return nil
}

// leaf returns a leaf page. It reads up to 32 leaves at once if they are adjacent in the file, as those of
// a table that grows at its end mostly are: a replay reads them in this order.
func (t *Table) leaf(i int) ([]byte, error) {
	size := t.f.pageSize
	if i < t.first || i >= t.first+len(t.buf)/size {
		n := 1
		for n < maxReadPages && i+n < len(t.leaves) && t.leaves[i+n] == t.leaves[i]+uint32(n) {
			n++
		}
		if cap(t.buf) == 0 {
			t.buf = make([]byte, 0, maxReadPages*size)
		}
		t.buf, t.first = t.buf[:n*size], i
		if err := t.readPages(t.buf, t.leaves[i]); err != nil {
			t.buf = t.buf[:0]
			return nil, err
		}
	}
	at := (i - t.first) * size
	return t.buf[at : at+size], nil
}
