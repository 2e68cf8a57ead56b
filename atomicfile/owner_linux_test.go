package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Root may lack CAP_CHOWN in a container. A directory of root with another group must work there; one of
// another user must not, since that user could not read the file.
func TestOwnLikeWithoutCapChown(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	newDir := func(uid int) string {
		dir := t.TempDir()
		if err := os.Chown(dir, uid, 12345); err != nil {
			t.Skip(err)
		}
		return dir
	}
	ofRoot, ofUser := newDir(0), newDir(12345)
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // capabilities are those of a thread, which ends with this goroutine
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		if err := unix.Capget(&header, &caps[0]); err != nil {
			t.Error(err)
			return
		}
		caps[0].Effective &^= 1 << unix.CAP_CHOWN
		if err := unix.Capset(&header, &caps[0]); err != nil {
			t.Error(err)
			return
		}
		if err := Replace(filepath.Join(ofRoot, "file"), []byte("x")); err != nil {
			t.Errorf("in a directory of root: got %v, want no error", err)
		}
		if err := Replace(filepath.Join(ofUser, "file"), []byte("x")); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("in a directory of a user: got %v, want %v", err, fs.ErrPermission)
		}
	}()
	<-done
}
