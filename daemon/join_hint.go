package daemon

import (
	"errors"
	"io/fs"
	"path/filepath"

	"agentctl/enrollment"
	"agentctl/transport/enroll"
)

// retryHint is JoinHint for what the daemon does, which it repeats by itself.
func retryHint(err error) string {
	const byItself = "the daemon tries again by itself"
	var e *enroll.Error
	var storage *enroll.StorageError
	switch {
	case errors.As(err, &storage):
		return "free or repair the disk, or give the state directory to the daemon's user; " + byItself
	case errors.As(err, &e) && (e.Kind == enroll.RateLimited || e.Reason == enrollment.ReasonNonce), JoinHint(err) == enroll.HintAgain:
		return byItself
	}
	return JoinHint(err)
}

// JoinHint returns the next step for an error of package enroll, or of a join by file. The
// commands `join` and `doctor` and the daemon's status and log share it.
func JoinHint(err error) string {
	var file *fs.PathError
	var configured *ConfiguredRelayError
	isOther := errors.As(err, new(*enroll.StorageError)) || errors.As(err, new(*enroll.JoinedError))
	switch {
	case isOther:
	case errors.As(err, &file) && errors.Is(err, fs.ErrPermission):
		return "give it to the daemon's user: sudo chown --reference=" + filepath.Dir(file.Path) + " " + file.Path
	case errors.As(err, &file):
		return "repair the disk: see dmesg; the daemon reads the file again when the disk works"
	case errors.As(err, &configured):
		return "remove relay there, then do the same again"
	}
	return enroll.Hint(err)
}
