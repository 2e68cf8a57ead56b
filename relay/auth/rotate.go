package auth

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"go.uber.org/zap"
)

// States of a key, for people.
const (
	KeySigns      = "signs"      // and verifies
	KeyVerifies   = "verifies"   // until its last token has expired
	KeyExpired    = "expired"    // verifies nothing; a later rotation deletes it
	KeyMissing    = "missing"    // recorded, but its file was taken away: verifies nothing
	KeyUnrecorded = "unrecorded" // a file that is not a key of this relay: not used
)

// KeyInfo is one row of `agentctl keys ls`.
type KeyInfo struct {
	KID           string     `json:"kid"`
	State         string     `json:"state"`
	Created       *time.Time `json:"created,omitempty"`        // nil: unrecorded
	VerifiesUntil *time.Time `json:"verifies_until,omitempty"` // nil: it signs, or is unrecorded
}

// Keys lists the signing keys, the oldest first, and after them the files in keys/ that are
// not used.
func (s *Store) Keys(ctx context.Context) ([]KeyInfo, error) {
	list := []KeyInfo{} // in JSON an empty list is [] and not null
	rows, _, err := readKeyRows(ctx, s.db.readDB)
	if err != nil {
		return nil, explain(s.dir.path, err)
	}
	files, err := listKIDs(s.dir)
	if err != nil {
		return nil, explain(s.dir.path, err)
	}
	for _, r := range rows {
		i := slices.Index(files, r.kid)
		list = append(list, r.info(i >= 0, s.now()))
		if i >= 0 {
			files = slices.Delete(files, i, i+1)
		}
	}
	for _, kid := range files {
		list = append(list, KeyInfo{KID: kid, State: KeyUnrecorded})
	}
	return list, nil
}

// info describes a row for people.
func (r *keyRow) info(hasFile bool, now time.Time) KeyInfo {
	created := time.Unix(r.created, 0).UTC()
	k := KeyInfo{KID: r.kid, Created: &created, State: KeySigns}
	if r.until != 0 {
		until := time.Unix(r.until, 0).UTC()
		k.VerifiesUntil, k.State = &until, KeyVerifies
		if now.Unix() >= r.until {
			k.State = KeyExpired
		}
	}
	if !hasFile {
		k.State = KeyMissing
	}
	return k
}

// RotateRequest selects how RotateKeys works.
type RotateRequest struct {
	// DropOld takes every older key out of use at once, for a key that has leaked: tokens that
	// they signed stop working, and boards that have joined get new ones by themselves.
	DropOld bool
	DryRun  bool // change nothing
}

// RotateKeys makes a new signing key. Keys that were replaced verify until the last token that
// they signed has expired, and are deleted by a rotation that comes later. Other processes use
// the new key within PollInterval. It returns the keys as they are afterwards.
//
// The steps, each of which leaves a working state when the process ends after it: the new
// file, which is not used before it is recorded; the transaction, which records it and
// replaces the old key; the files of keys that are recorded no more, which are not used.
func (s *Store) RotateKeys(ctx context.Context, req RotateRequest) (list []KeyInfo, err error) {
	var made string
	var gone []string
	err = s.db.write(ctx, func(tx *sql.Tx) (err error) {
		if gone, err = deleteKeyRows(tx, req.DropOld, s.now()); err != nil {
			return err
		}
		if req.DryRun {
			return errDryRun
		}
		kid, public, err := makeKey(s.dir)
		if err != nil {
			return err
		}
		made = kid
		return replaceSigningKey(tx, kid, public, s.now())
	}, nil)
	if errors.Is(err, errDryRun) {
		return s.Keys(ctx)
	}
	if err != nil {
		if made != "" { // not recorded
			_ = s.dir.root.Remove(keyFile(made))
		}
		return nil, fmt.Errorf("rotate the signing key: %w", err)
	}
	for _, kid := range gone {
		if err := s.dir.root.Remove(keyFile(kid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.log.Warn("a key that is no longer used was not deleted; delete it", zap.String("file", keyFile(kid)), zap.Error(err))
		}
	}
	if err := s.loadKeyring(ctx); err != nil {
		return nil, explain(s.dir.path, err)
	}
	s.log.Info("signing key rotated", zap.String("signing", made), zap.Strings("deleted", gone))
	return s.Keys(ctx)
}

// deleteKeyRows deletes the rows of keys that expired long ago, or with dropOld those of all keys, and
// returns their kids. It fails if another key would be one too many (maxKeys).
func deleteKeyRows(tx *sql.Tx, dropOld bool, now time.Time) (gone []string, err error) {
	where, args := "until <> 0 AND until < ?", []any{now.Add(-expiredKeyRetention).Unix()}
	if dropOld {
		where, args = "true", nil
	}
	err = forEachRow(context.Background(), tx, func(scan func(...any) error) error {
		var kid string
		err := scan(&kid)
		gone = append(gone, kid)
		return err
	}, "DELETE FROM keys WHERE "+where+" RETURNING kid", args...)
	if err != nil {
		return nil, err
	}
	var left int
	if err := tx.QueryRow("SELECT count(*) FROM keys").Scan(&left); err != nil {
		return nil, err
	}
	if left >= maxKeys {
		return nil, fmt.Errorf("%w: %d keys still verify tokens; wait until some have expired, or drop the old ones", ErrFull, left)
	}
	return gone, nil
}
