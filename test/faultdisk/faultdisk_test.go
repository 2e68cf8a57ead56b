package faultdisk_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"agentctl/test/faultdisk"
)

// TestFaults checks that each fault is what its name says: tests that trust the disk would
// otherwise pass on one that is well.
func TestFaults(t *testing.T) {
	d := faultdisk.New(t)
	path := filepath.Join(d.Dir, "a.txt")
	write := func(text string) error { return os.WriteFile(path, []byte(text), 0o600) }
	if err := write("sound"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		fault []string
		want  error
	}{
		{[]string{"fail", "write", "a.*", "EIO"}, syscall.EIO},
		{[]string{"fail", "open", "a.*", "EACCES"}, syscall.EACCES},
		{[]string{"readonly"}, syscall.EROFS},
		{[]string{"full", "3"}, syscall.ENOSPC},
		{[]string{"fail", "write", "b.*", "EIO"}, nil},
	} {
		d.Fault(c.fault...)
		if err := write("longer than before"); !errors.Is(err, c.want) {
			t.Errorf("%v: %v", c.fault, err)
		}
		d.Clear()
		if err := write("sound"); err != nil {
			t.Errorf("after %v: %v", c.fault, err)
		}
	}
	d.Fault("tear", "a.txt")
	if err := write("0123456789"); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(filepath.Join(d.Backing, "a.txt")); string(b) != "01234" {
		t.Errorf("torn write stored %q", b)
	}
	d.Clear()

	d.Fault("hang", "write", "*")
	done := make(chan error, 1)
	go func() { done <- write("late") }()
	select {
	case err := <-done:
		t.Errorf("a hanging write returned: %v", err)
	default:
	}
	d.Clear()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
