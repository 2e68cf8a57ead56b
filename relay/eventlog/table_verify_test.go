package eventlog

import (
	"os"
	"reflect"
	"testing"
)

// A log that is checked in parts has the index of one that is checked as a whole.
func TestIndexOfParts(t *testing.T) {
	path, _ := mixedLog(t, 600)
	s := open(t, Options{Path: path})
	if err := s.table.verify(1); err != nil {
		t.Fatal(err)
	}
	want := s.table.leafIndex
	for _, parts := range []int{2, 3, s.table.rows.Leaves(), 2 * s.table.rows.Leaves()} {
		if err := s.table.verify(parts); err != nil {
			t.Errorf("%d parts: %v", parts, err)
		}
		if !reflect.DeepEqual(s.table.leafIndex, want) {
			t.Errorf("%d parts: another index than of one", parts)
		}
	}
}

// A change that the check of the whole table finds is found in parts as well, also in the first row of
// a part, whose hash depends on another part.
func TestChangesInParts(t *testing.T) {
	path, _ := mixedLog(t, 300)
	s := open(t, Options{Path: path})
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	found, step := 0, int64(3989)
	if slow() {
		step = 499
	}
	for at := int64(pageSize); at < info.Size(); at += step {
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 1
		if _, err := f.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
		whole := s.table.verify(1)
		if whole != nil {
			found++
		}
		for _, parts := range []int{3, s.table.rows.Leaves()} {
			if err := s.table.verify(parts); (err == nil) != (whole == nil) {
				t.Errorf("byte %d changed: %d parts say %v, the whole table %v", at, parts, err, whole)
			}
		}
		b[0] ^= 1
		if _, err := f.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
	if found < 20 {
		t.Errorf("only %d changes were found", found)
	}
}

// Events that are missing at the end of a chain, or at its beginning, are noticed in parts as well.
func TestMissingRowsInParts(t *testing.T) {
	path, _ := mixedLog(t, 600)
	s := open(t, Options{Path: path})
	for name, change := range map[string]func(c *chain){
		"the newest": func(c *chain) { c.last++; c.head[0] ^= 1 },
		"the oldest": func(c *chain) { c.anchor[0] ^= 1 },
	} {
		t.Run(name, func(t *testing.T) {
			for id, c := range s.table.chains {
				if c.class != ClassState {
					continue
				}
				saved := *c
				change(c)
				for _, parts := range []int{1, 3} {
					if s.table.verify(parts) == nil {
						t.Errorf("chain %d, %d parts: not noticed", id, parts)
					}
				}
				*c = saved
			}
		})
	}
}
