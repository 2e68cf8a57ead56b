package enroll

import (
	"errors"
	"os"
)

// errNoBoard reports that boards are not on Windows; clients use this package's Client only.
var errNoBoard = errors.New("boards run Linux")

func tryLock(*os.File) (isBusy bool, err error) { return false, errNoBoard }

func openNoFollow(string) (*os.File, error) { return nil, errNoBoard }

func isWritable(string) bool { return false }
