package disk

import (
	"errors"
	"io/fs"
	"os"

	"github.com/berth-dev/berth/services/hostagent/internal/extents"
)

// alone is what a file holds that no clone shares: its removal returns so much. A missing file holds
// nothing.
func alone(path string) (uint64, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	return extents.Alone(f)
}
